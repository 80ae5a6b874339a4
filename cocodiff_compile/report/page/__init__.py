"""Makes pages: sections of tables, timelines, diffs and pictures become one HTML file."""
