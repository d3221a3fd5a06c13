"""Searches for jobs: time, price and energy of a target, and what a change makes of them."""
