"""Estimates how long ops, exchanges and whole programs take: the only cost model."""
