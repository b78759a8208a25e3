"""What a comparison says beyond accuracy and cost, and the tables of strings that it is shown in."""
