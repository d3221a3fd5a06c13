"""Who computes how much: exact batch splits over unlike workers, and the plans made of them."""

from pyps.solver.costs import Cost, Costs, Line, Table
from pyps.solver.exact.minmax import Problem, Solution, solve

__all__ = ["Cost", "Costs", "Line", "Problem", "Solution", "Table", "solve"]
