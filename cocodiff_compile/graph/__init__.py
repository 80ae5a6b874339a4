"""Graphs: the ops in them, where their data goes, and what recognition finds."""
