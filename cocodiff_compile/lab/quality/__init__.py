"""Implements `cocodiff quality`: a small trained model, and how far lossy runs of it are off."""
