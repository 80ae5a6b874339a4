"""Implements `cocodiff bench`: benchmarks of whole models over slow links."""
