"""Ulysses for diffusers transformers."""
