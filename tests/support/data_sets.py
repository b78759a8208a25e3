"""Data sets of reasoning-gym that tests of this room treat apart."""

FOLLOW_SETS = ["isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]
"""Their entries follow the order of sets of texts, which is a process's own unless PYTHONHASHSEED is given."""
