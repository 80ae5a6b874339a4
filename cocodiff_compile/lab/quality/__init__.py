"""Implements `cocodiff quality`: a small trained model, and measures of how far lossy runs are
off.
"""
