# SPDX-License-Identifier: Apache-2.0
"""Makes pages: sections of tables, timelines, diffs and pictures become one HTML file."""
