"""Ranks that somebody started: which one this is, where they meet, what they talk over."""
