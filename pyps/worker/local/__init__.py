"""Take local steps by a worker's own optimizers, and keep their state."""
