# SPDX-License-Identifier: Apache-2.0
"""Tries shard-tokens on every transformer class of diffusers: small, on simulated ranks."""
