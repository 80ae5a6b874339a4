# SPDX-License-Identifier: Apache-2.0
"""Finds Ulysses attentions in a graph, or says why something that looks like one is none."""
