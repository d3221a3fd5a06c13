"""Agreement of the ranks of a process group: decisions of the first one, and rows that all compare."""
