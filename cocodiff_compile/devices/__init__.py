"""Describes each kind of device: its rates, its transports, and its settings for Inductor."""
