# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff bench`: benchmarks of whole models over slow links."""
