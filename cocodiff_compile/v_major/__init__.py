"""Selective exchange across denoising steps: what travels in which step, and what is remembered."""
