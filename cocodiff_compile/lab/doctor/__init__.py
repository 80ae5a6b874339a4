# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff doctor`: what this machine has, what would be used, what would fail."""
