"""Define what the processes of benchmarks/local_link.py do: a rank of uneven int8 DDP, or a worker of local
steps.

Both train the model of examples/local_steps. A rank of DDP holds its gradients back for as long as its device
would take; local steps are throttled by `pyps run`. Both read LR, the learning rate of AdamW; local steps
also OUTER, the rate and Nesterov's momentum of the store's SGD.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyps
from pyps.profiler.throttle import sleep_until
from pyps.torch import GlobalMean
from pyps.worker.data.sampling import indices

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "local_steps"))
from text import load
from train import Transformer, loss_of


def make_model(seed: int) -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=float(os.environ["LR"]))


def every_step(batches: list[int], sample_seconds: list[float], samples: int, every: int, seed: int) -> None:
    """A rank of DDP. Rank 0 prints [seconds, samples, held-out loss], about every so many samples, and the
    seconds that a step takes, as JSON.
    """
    dist.init_process_group("gloo")
    rank, whole = dist.get_rank(), sum(batches)
    training, held_out = load()
    model, optimizer = make_model(seed)
    ddp = DistributedDataParallel(model)
    mean = GlobalMean(ddp, wire="int8")
    own = sample_seconds[rank] * batches[rank]
    began = time.monotonic()
    first_layer = next(model.parameters())  # its gradient comes last
    first_layer.register_hook(lambda _: sleep_until(round((began + own) * 1e9)))
    kept, start = [(0.0, 0, model.state_dict())], 0.0
    dist.barrier()
    start = began = time.monotonic()
    for first in range(0, samples, whole):
        place = first + sum(batches[:rank])
        rows = torch.from_numpy(indices(place, batches[rank], len(training), seed))
        optimizer.zero_grad()
        text = training[rows]
        logits = ddp(text[:, :-1])
        mean.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
        optimizer.step()
        began = time.monotonic()
        if rank == 0 and (first + whole) // every > first // every:
            now = {name: value.clone() for name, value in model.state_dict().items()}
            kept.append((began - start, first + whole, now))
    seconds = (time.monotonic() - start) * whole / samples
    dist.destroy_process_group()
    if rank == 0:
        curve = []
        for at, trained, state in kept[1:]:
            model.load_state_dict(state)
            with torch.no_grad():
                curve.append((at, trained, float(loss_of(model, held_out))))
        print(json.dumps({"curve": curve, "step_seconds": seconds}), flush=True)


def local_steps(seed: int) -> None:
    """A worker of local steps."""
    training, _ = load()
    model, optimizer = make_model(seed)
    lr, momentum = json.loads(os.environ["OUTER"])
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    with pyps.join() as worker:
        worker.attach(model, optimizer, outer=outer)
        for (text,) in worker.batches((training,)):
            loss = loss_of(model, text)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        every_step(**json.loads(sys.argv[1]))
        sys.stdout.flush()
        os._exit(0)  # torch's own threads may abort a process while its interpreter is torn down
    local_steps(int(os.environ["MODEL_SEED"]))
