# SPDX-License-Identifier: Apache-2.0
"""Estimates how long ops, exchanges and whole programs take: the only cost model."""
