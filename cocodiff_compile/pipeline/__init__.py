# SPDX-License-Identifier: Apache-2.0
"""Runs passes in order, and checks the graph after each."""
