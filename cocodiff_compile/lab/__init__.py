"""Provides small models, local ranks, an emulated cluster, benchmarks and the demo."""
