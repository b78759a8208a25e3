"""Measures of runs beyond accuracy and cost, and the tables of strings that show comparisons."""
