"""A compiler backend for Ulysses-parallel diffusion transformers."""
