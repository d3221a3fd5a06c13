"""A run on this machine: launch the ranks, watch them, rebalance, and report."""
