# SPDX-License-Identifier: Apache-2.0
"""Describes each kind of device: its rates, its transports, and its settings for Inductor."""
