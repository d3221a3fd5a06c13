"""Exact splits: min-max by bisection, subsets of workers, and which totals can be reached."""
