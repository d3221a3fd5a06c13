"""A run on this machine: launch a process for each rank, watch it, rebalance, and report.

    from pyps.run import RunOptions, run

    report = run("plan.json", "train.py", RunOptions(samples=100_000, policy="bsp"))

spec.py says what to run, launcher.py and process.py run it, rebalance.py moves samples between ranks, main.py
puts it together. pyps.formats.events and records hold what happened, pyps.report shows it.
"""

from pyps.report.report import Report
from pyps.run.main import run
from pyps.run.options import RunOptions

__all__ = ["Report", "RunOptions", "run"]
