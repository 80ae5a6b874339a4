# SPDX-License-Identifier: Apache-2.0
"""Compresses exchanges across denoising steps: payloads, caches, the code, the selective call."""
