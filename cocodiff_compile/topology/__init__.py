# SPDX-License-Identifier: Apache-2.0
"""Describes the machine: ranks on ordered axes (tile, GPU, node ...), and the links along them."""
