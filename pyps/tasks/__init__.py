"""What is trained: the built-in tasks, and those found by name."""
