"""R2SP against BSP on a shaped link: python benchmarks/papers/ring.py [--docs] (root: network namespaces).

Four workers on one side of a link, the store on the other (pyps serve over TCP, the link shaped by tc tbf).
The network is trained on scikit-learn's digits; a step of computing lasts six times as long as the network
takes over the link one way. BSP's workers all transfer at once and compute at once; R2SP's take turns. Each
runs with every step size of a grid. The result is the time to the loss with its best step size, over all of
the training data, as an observer on the store's host sees it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from benchmark_tools import record, shaped

import pyps
from pyps.errors import NotReady, SegmentNotFound
from pyps.tasks.builtin import digits_mlp
from pyps.worker.attach import load_parameters

WORKERS, BATCH, SAMPLES = 4, 16, 0
ONE_WAY_SECONDS, STEP_SECONDS = 0.06, 0.36
TARGET, LIMIT_SECONDS, LOOK_SECONDS = 0.35, 60.0, 0.1
STEP_SIZES = {"bsp": (0.2, 0.4, 0.8), "r2sp": (0.05, 0.1, 0.2)}
HERE = Path(__file__).resolve().parent


def data_and_model() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.nn.Module]:
    """All training images with their labels, and the network as it begins."""
    sys.path.insert(0, str(HERE.parents[1] / "examples" / "digits"))
    import data

    return data.load()[0], digits_mlp(seed=0).model


@contextmanager
def training(link: shaped.Shaped, name: str, policy: str, lr: float) -> Iterator[None]:
    """Runs the server and the workers, and ends them."""
    pyps_command = str(Path(sys.executable).parent / "pyps")
    serve = [pyps_command, "serve", name, "--bind", f"tcp://{shaped.SERVER}:*", "--insecure"]
    with ExitStack() as stack:
        server = subprocess.Popen(link.command(link.server, *serve), stdout=subprocess.PIPE, text=True)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("tcp://"))
        for rank in range(WORKERS):
            command = [sys.executable, str(HERE / "ring_worker.py"), address]
            command += [str(rank), policy, str(lr), str(STEP_SECONDS)]
            worker = subprocess.Popen(link.command(link.client, *command), stderr=subprocess.DEVNULL)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        yield


def observed(name: str) -> pyps.Store:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        try:
            store = pyps.Store.open(name)
        except (SegmentNotFound, NotReady):
            time.sleep(LOOK_SECONDS)
            continue
        while not store.status().all_joined and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return store
    sys.exit("the workers did not come")


def seconds_to_target(link: shaped.Shaped, policy: str, lr: float) -> tuple[float, float]:
    """From when all had joined (infinite: not within the limit), and the mean staleness of a push."""
    (images, labels), model = data_and_model()
    name = f"ring-{os.getpid()}"
    with training(link, name, policy, lr), observed(name) as store:
        began, seen = time.monotonic(), -1
        while (passed := time.monotonic() - began) < LIMIT_SECONDS:
            time.sleep(LOOK_SECONDS)
            if store.status().version == seen:
                continue
            seen = load_parameters(store, model)
            with torch.no_grad():
                loss = float(torch.nn.functional.cross_entropy(model(images), labels))
            if loss <= TARGET:
                break
        else:
            passed = float("inf")
        ranks = store.ranks()
    pushes = sum(rank.pushes for rank in ranks)
    return passed, sum(rank.staleness_sum for rank in ranks) / max(1, pushes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--runs", type=int, default=3, help="Of the best step size, the tuning's included.")
    options = parser.parse_args()
    if why := shaped.missing():
        sys.exit(why)
    torch.set_num_threads(1)
    parameters = sum(p.numel() for p in data_and_model()[1].parameters())
    rate = round(32 * parameters / ONE_WAY_SECONDS / 1e6)
    rows, best = [["policy", "step size", "seconds to the loss", "staleness"]], {}
    with shaped.shaped(f"{rate}mbit") as link, record.others_share() as others:
        for policy, sizes in STEP_SIZES.items():
            tried = {lr: seconds_to_target(link, policy, lr) for lr in sizes}
            lr = min(tried, key=lambda size: tried[size][0])
            again = [tried[lr], *(seconds_to_target(link, policy, lr) for _ in range(options.runs - 1))]
            seconds = [one[0] for one in again]
            best[policy] = statistics.median(seconds)
            spread = f"{best[policy]:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
            rows.append([policy, f"{lr:g} of {', '.join(map(str, sizes))}", spread, f"{again[0][1]:.2f}"])
            print(policy, {size: round(found[0], 1) for size, found in tried.items()}, flush=True)
    setting = (
        f"{WORKERS} workers, {parameters:,} parameters, {rate} Mbit/s, computing {STEP_SECONDS} s, one way "
        f"{ONE_WAY_SECONDS} s, to a training loss of {TARGET}"
    )
    gain = f"R2SP is {best['bsp'] / best['r2sp']:.2f} times as fast"
    text = f"{record.machine()}, others {others[0]:.0%}. {setting}: {gain}.\n\n{record.table(rows)}"
    print(text)
    if options.docs:
        record.write_section("ring", text)


if __name__ == "__main__":
    main()
