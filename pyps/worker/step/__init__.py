"""Carry out a worker's steps: claim, compute, push, pull."""
