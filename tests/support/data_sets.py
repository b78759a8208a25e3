"""Data sets of reasoning-gym that tests treat apart."""

FOLLOW_SETS = ["isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]
"""Data sets whose entries follow the order of sets of texts, which varies by process without PYTHONHASHSEED."""
