"""Benchmarks of whole models over slow links: what `cocodiff bench` runs."""
