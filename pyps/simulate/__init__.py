"""Training in virtual time: the decisions of the C core, the times of cost models, links that are shared.

result = simulate(scenario_of("cluster.toml"), "ssp:bound=4", iterations=100)
"""

from pyps.simulate.devices import Slowdown
from pyps.simulate.metrics import RankResult, Result
from pyps.simulate.problem import Learning, Logistic, TorchLearning
from pyps.simulate.replay import replay
from pyps.simulate.run import compare, simulate
from pyps.simulate.scenario import Mishap, Scenario, SimWorker, scenario_of

__all__ = [
    "Learning",
    "Logistic",
    "Mishap",
    "RankResult",
    "Result",
    "Scenario",
    "SimWorker",
    "Slowdown",
    "TorchLearning",
    "compare",
    "replay",
    "scenario_of",
    "simulate",
]
