"""Presents plans: explanations, warnings, what-if, pictures."""
