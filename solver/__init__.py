"""Splits a global batch exactly over unlike workers, and makes plans of such splits."""

from pyps.solver.costs import Cost, Costs, Line, Table
from pyps.solver.exact.minmax import Problem, Solution, solve

__all__ = ["Cost", "Costs", "Line", "Problem", "Solution", "Table", "solve"]
