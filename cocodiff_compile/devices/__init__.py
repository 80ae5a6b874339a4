"""Describes each kind of device: its rates, how its ranks communicate, what Inductor is told."""
