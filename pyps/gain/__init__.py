"""Measure what batches that fit the devices would gain for a DDP script that is not changed.

measure  which runs are made, what each device's batches take, and the split that is planned from it
ranks    one run: a process for each device, until enough batches were timed
rank     in such a process: the script, with batches of other sizes
lines    what to change in the script
"""

from pyps.gain.lines import LineChange, changes
from pyps.gain.measure import Gain, TimedSplit, measure_gain

__all__ = ["Gain", "LineChange", "TimedSplit", "changes", "measure_gain"]
