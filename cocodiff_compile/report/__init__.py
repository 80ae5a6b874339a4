"""What the backend did, written down: as data, as tables, as files that run."""
