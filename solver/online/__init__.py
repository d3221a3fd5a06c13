"""Estimates costs while a run trains, and decides when to move samples."""
