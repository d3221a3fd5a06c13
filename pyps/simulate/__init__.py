"""Simulate training in virtual time: decisions from the C core, times from cost models, shared links.

result = simulate(scenario_of("cluster.toml"), "ssp:bound=4", iterations=100)
"""

from pyps.simulate.faults import Fault
from pyps.simulate.metrics import Result, SimulatedRank
from pyps.simulate.problem import LocalOptimizer, Logistic, Objective, Quadratic, TorchObjective
from pyps.simulate.run import compare, replay, simulate
from pyps.simulate.scenario import Scenario, SimWorker, Slowdown, scenario_of

__all__ = [
    "Fault",
    "LocalOptimizer",
    "Logistic",
    "Objective",
    "Quadratic",
    "Result",
    "Scenario",
    "SimWorker",
    "SimulatedRank",
    "Slowdown",
    "TorchObjective",
    "compare",
    "replay",
    "scenario_of",
    "simulate",
]
