# SPDX-License-Identifier: Apache-2.0
"""Estimates a step on a machine one does not have: `cocodiff simulate`."""
