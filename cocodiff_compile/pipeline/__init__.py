"""Runs passes in order, and checks the graph after each."""
