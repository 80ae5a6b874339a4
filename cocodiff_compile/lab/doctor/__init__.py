"""Implements `cocodiff doctor`: reports what this machine has, what would be used, and what would
fail.
"""
