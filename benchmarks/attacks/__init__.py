"""Families of hostile input, one file per family: each draws its cases from a seed, and `attack.py` runs them."""
