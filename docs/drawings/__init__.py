# SPDX-License-Identifier: Apache-2.0
"""The drawings of docs/concepts, one module each."""
