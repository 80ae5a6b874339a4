# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff quality`: a small trained model, and how far lossy runs of it are off."""
