"""Tell a worker of its run: settings, mode, position, memory, and when to leave."""
