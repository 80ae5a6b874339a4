# SPDX-License-Identifier: Apache-2.0
"""Connects the ranks: launch, agreement, process groups, detection and measurement of links."""
