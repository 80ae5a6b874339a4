"""Tries shard-tokens on every transformer class of diffusers: small, on simulated ranks."""
