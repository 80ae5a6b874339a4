"""Estimates a step on a machine one does not have: `cocodiff simulate`."""
