"""Exact solvers: the min-max split, the choice of workers, and subset sums."""
