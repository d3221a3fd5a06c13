"""One worker that turns slower: straggler_worker.py COSTS LATE_RANK FROM_STEP ADDED_SECONDS.

COSTS is a JSON list of [fixed, per-sample] seconds by rank: a step is that much sleep, and from a step of its
own on the late rank sleeps longer.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import pyps


def main() -> None:
    torch.set_num_threads(1)
    costs, late, begins, added = json.loads(sys.argv[1]), *(float(text) for text in sys.argv[2:5])
    model, data = nn.Linear(4, 1), (torch.zeros(512, 4), torch.zeros(512, 1))
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        fixed, each = costs[worker.rank]
        for step, (inputs, targets) in enumerate(worker.batches(data)):
            more = added if worker.rank == late and step >= begins else 0.0
            time.sleep(fixed + each * len(inputs) + more)
            nn.functional.mse_loss(model(inputs), targets).backward()
            worker.step()


if __name__ == "__main__":
    main()
