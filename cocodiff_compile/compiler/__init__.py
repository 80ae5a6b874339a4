# SPDX-License-Identifier: Apache-2.0
"""Compiles one captured graph: capture, decisions, passes, hand-off to Inductor."""
