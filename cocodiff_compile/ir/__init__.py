# SPDX-License-Identifier: Apache-2.0
"""The graph as passes see it: ATen ops, layouts of tensors, records of what was recognised."""
