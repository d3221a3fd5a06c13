"""A plan for people: explanations, warnings, what-if, pictures."""
