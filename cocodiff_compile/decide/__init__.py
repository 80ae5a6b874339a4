# SPDX-License-Identifier: Apache-2.0
"""Chooses between candidates by their estimated time."""
