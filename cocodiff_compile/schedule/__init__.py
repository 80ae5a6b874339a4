"""Orders the steps of a rank's program: tasks, an order for them, and what it saves."""
