"""Which step of a rank's program comes when: tasks, their costs, and an order for them."""
