"""Compiles one captured graph: capture, decisions, passes, hand-off to Inductor."""
