# SPDX-License-Identifier: Apache-2.0
"""Shares the tokens of a plain model out over ranks: spreads cuts, emits what a rank computes."""
