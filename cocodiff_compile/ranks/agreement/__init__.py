# SPDX-License-Identifier: Apache-2.0
"""Makes ranks agree on what they compile and run, or all of them raise: none is left waiting."""
