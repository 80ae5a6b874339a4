# SPDX-License-Identifier: Apache-2.0
"""Reports what the compiler did: as data, as tables, and as files that run."""
