"""Ranks agree on what they compile, or all of them raise: no rank is left in a collective."""
