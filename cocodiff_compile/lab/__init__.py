# SPDX-License-Identifier: Apache-2.0
"""Provides small models, local ranks, an emulated cluster, benchmarks and the demo."""
