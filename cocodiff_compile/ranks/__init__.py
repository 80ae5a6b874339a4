"""Connects the ranks: launch, agreement, process groups, detection and measurement of links."""
