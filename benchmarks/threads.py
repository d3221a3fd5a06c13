"""One and two threads that share a worker's chunks, and torch's fused step with as many.

    python benchmarks/threads.py [--parameters 25000000] [--rounds 9] [--save]

Walls of idle cores; where other processes want them too, what the busier thread ran says more: a call lasts
about as long. Torch's step works in place; the rows "and a look" refuse a gradient with NaN, as a push does.
The first two rows are memory alone: what two threads can gain where it sets the pace.
Interleaved rounds, medians with the range. With --save the table goes to bench-out/, one for each
instruction set.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from record import machine, milliseconds, save_table, table

from pyps import Hyper, Store, native
from pyps.native import isa
from pyps.store.staging import StagingBuffer

COUNTS = (1, 2)
HYPER = Hyper(lr=1e-3)
THREAD_CPU_CLOCK = 6  # with a thread's number the clock of its CPU time, as pthread_getcpuclockid makes it
Times = dict[tuple[str, int], list[tuple[float, float]]]
Calls = Iterator[tuple[str, Callable[[], object]]]  # names, and what is timed


def spent_by(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and those that the thread that worked longest ran."""

    def ran() -> dict[int, int]:
        found = {}
        for task in map(int, os.listdir("/proc/self/task")):
            with suppress(OSError):  # it ended since it was listed
                found[task] = time.clock_gettime_ns(~task << 3 | THREAD_CPU_CLOCK)
        return found

    before, began = ran(), time.perf_counter()
    call()
    wall = time.perf_counter() - began
    return wall, max(now - before.get(task, 0) for task, now in ran().items()) / 1e9


def stepping(optimizer: Any, gradient: Any, looks: bool = False) -> Callable[[], None]:
    """A step with a gradient that was written just now, as for our pushes. looks: it refuses one with NaN, by
    its norm, as torch.nn.utils.clip_grad_norm_ does.
    """
    gradient.fill_(1e-3)

    def step() -> None:
        if looks and not gradient.norm().isfinite():
            raise FloatingPointError
        optimizer.step()

    return step


def ours(store: Store, flat: Any, threads: int) -> Calls:
    """Return what a store does, with so many threads; what is not timed is done first."""

    def staged() -> StagingBuffer:
        store.start()
        staging = store.stage()
        staging.flat.fill(1e-3)
        return staging

    if store.set_threads(threads) != threads:
        raise SystemExit(f"{store.name}: found no slot for {threads} threads")
    yield "push", partial(store.push, staged(), 1, HYPER)
    yield "push, looked at in backward", partial(store.push, staged(), 1, HYPER, looked=[(0, flat.size)])
    yield "exchange", partial(store.exchange, staged(), 1, HYPER, flat)
    yield "pull", partial(store.pull, flat)


def memory(parameters: int) -> Callable[[int], Calls]:
    """A copy, and reads alone, by one thread or in halves by two."""
    source, copy = np.ones(parameters, np.float32), np.zeros(parameters, np.float32)
    pool, half = ThreadPoolExecutor(1), parameters // 2

    def divided(work: Callable[[slice], object], threads: int) -> None:
        if threads == 1:
            work(slice(None))
            return
        other = pool.submit(work, slice(half, None))
        work(slice(half))
        other.result()

    def calls(threads: int) -> Calls:
        yield "memcpy", partial(divided, lambda part: np.copyto(copy[part], source[part]), threads)
        yield "reads alone (a look)", partial(divided, lambda part: native.finite(source[part]), threads)

    return calls


def set_rivals_threads(threads: int) -> None:
    """Set the threads of torch, and of what was compiled for it: that is linked to the system's OpenMP, not
    to torch's.
    """
    import torch

    torch.set_num_threads(threads)
    with suppress(OSError):
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)


def deepspeed_adam(parameters: int) -> tuple[Any, Any] | None:
    """DeepSpeed's AdamW for the CPU, which it compiles for this machine when first used, and its gradient."""
    import torch

    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        print("DeepSpeed is not installed: its rows are left out")
        return None
    parameter = torch.nn.Parameter(torch.zeros(parameters))
    parameter.grad = torch.full((parameters,), 1e-3)
    return DeepSpeedCPUAdam([parameter], lr=1e-3, adamw_mode=True), parameter.grad


def torch_step(name: str, parameters: int) -> Callable[[int], Calls]:
    """Torch's fused step, with so many threads, without and with a look."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(parameters))
    parameter.grad = torch.full((parameters,), 1e-3)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer = kind([parameter], lr=1e-3, fused=True)  # type: ignore[arg-type]
    other = deepspeed_adam(parameters) if name == "adamw" else None

    def steps(threads: int) -> Calls:
        set_rivals_threads(threads)
        yield "torch, fused", stepping(optimizer, parameter.grad)
        yield "torch, fused, and a look", stepping(optimizer, parameter.grad, True)
        if other is not None:
            yield "DeepSpeed CPUAdam", stepping(*other)

    return steps


def measure(ways: Sequence[Callable[[int], Calls]], rounds: int) -> Times:
    """Wall and CPU seconds by operation and threads, interleaved; one round to warm up is dropped."""
    found: Times = {}
    for number in range(rounds + 1):
        for threads in COUNTS:
            for calls in ways:
                for operation, call in calls(threads):
                    spent = spent_by(call)
                    if number:
                        found.setdefault((operation, threads), []).append(spent)
    return found


def measure_optimizer(optimizer: str, parameters: int, rounds: int) -> Times:
    """Our operations and torch's."""
    initial = {"w": np.zeros(parameters, np.float32)}
    name = f"threads-{os.getpid()}-{optimizer}"
    with Store.create(name, initial, batches=[1], policy="asp", optimizer=optimizer) as store:
        store.join(0)
        flat = np.zeros(store.layout.flat_elements, np.float32)
        return measure([partial(ours, store, flat), torch_step(optimizer, parameters)], rounds)


def shared(parameters: int, rounds: int) -> str:
    """The table."""
    lines = [["shared by two threads", "one, ms (range)", "two, ms (range)", "one / two", "busier one's CPU"]]
    measured = {"": measure([memory(parameters)], rounds)}
    measured |= {f"{name} ": measure_optimizer(name, parameters, rounds) for name in ("sgd", "adamw")}
    for optimizer, times in measured.items():
        for operation in dict.fromkeys(name for name, _ in times):
            walls, ran = ([[t[k] for t in times[operation, n]] for n in COUNTS] for k in range(2))
            ratios = [f"{statistics.median(t[0]) / statistics.median(t[1]):.2f}" for t in (walls, ran)]
            lines.append([f"{optimizer}{operation}", *map(milliseconds, walls), *ratios])
    return table(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found = shared(options.parameters, options.rounds)
    text = f"{machine()}; {options.parameters:,} fp32 parameters.\n\n{found}"
    print(text)
    if options.save:
        save_table(f"threads-{isa()}", text)


if __name__ == "__main__":
    main()
