"""What a shell needs of mrl."""
