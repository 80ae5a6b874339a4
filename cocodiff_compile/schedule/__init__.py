# SPDX-License-Identifier: Apache-2.0
"""Orders the steps of a rank's program: tasks, an order for them, and what it saves."""
