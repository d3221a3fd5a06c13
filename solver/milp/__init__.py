"""Mixed-integer programs: side constraints, the Pareto front, lower bounds, and independent checks."""
