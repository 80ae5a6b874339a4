"""Chooses between candidates by their estimated time."""
