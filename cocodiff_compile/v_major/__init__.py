"""Compresses exchanges across denoising steps: payloads, caches, the code, the selective call."""
