# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff demo`: what the compiler gains over slow links, in pictures and figures."""
