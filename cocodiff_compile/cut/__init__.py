# SPDX-License-Identifier: Apache-2.0
"""Follows heads, tokens and selected rows through a graph, and computes it in parts."""
