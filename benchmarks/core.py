"""Every operation of the C core against memcpy, in one run, and of torch, bitsandbytes and NumPy.

    python benchmarks/core.py [--parameters 25000000] [--rounds 9] [--save]

One thread, interleaved rounds, medians with the range. A ratio is the time over that of memcpy of the same
fp32 array; bytes are what an operation must read and write of each parameter. With --save the table and its
picture go to bench-out/, a table for each instruction set (PYPS_ISA chooses one; the picture shows the best).
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from record import kept_at, machine, milliseconds, save_table, seconds_of, table
from threads import deepspeed_adam, set_rivals_threads, shared, stepping

from pyps import Hyper, Store
from pyps.native import isa
from pyps.native.values import Encoding, PushRequest
from pyps.store.codec import Codec, decode, encode, encoded_bytes

Call = Callable[[], object]
HYPER = Hyper(lr=1e-3, momentum=0.9)
SKIPPING = Encoding(Codec.F32, nonfinite="skip")  # looks for NaN while it applies
REPEATS = 5  # calls in a row when two threads work
STATE_VECTORS = 3  # of AdamW's state: memcpy is timed on one


@dataclass(frozen=True)
class Operation:
    """`prepare` does the untimed work and returns the timed call. threshold: the largest ratio to memcpy."""

    name: str
    bytes_a_parameter: float
    prepare: Callable[[], Call]
    threshold: float | None = None
    against: str | None = None  # the operation of ours that does the same


def always(call: Call) -> Callable[[], Call]:
    return lambda: call


def codecs(x: Any) -> Iterator[Operation]:
    """Encoding to arrays, and decoding back."""
    n = x.size
    residual, rest, out = np.full(n, 1e-3, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for codec, threshold in ((Codec.INT8, 0.75), (Codec.INT4, 0.85), (Codec.NF4, None), (Codec.BF16, None)):
        data = np.zeros(encoded_bytes(codec, n), np.uint8)
        size, name = data.size / n, codec.name.lower()
        yield Operation(
            f"encode {name}", 4 + size, always(lambda c=codec, d=data: encode(x, c, out=d)), threshold
        )
        if codec in (Codec.INT8, Codec.INT4):
            feedback = {"residual": residual, "residual_out": rest}
            call = partial(encode, x, codec, out=data, **feedback)
            yield Operation(f"encode {name}, feedback", 12 + size, always(call), 1.8)
        yield Operation(f"decode {name}", 4 + size, always(lambda c=codec, d=data: decode(d, c, n, out)))


@contextmanager
def stores(n: int) -> Iterator[dict[str, Store]]:
    """One store for each optimizer, joined; "ahead, ..." for a peer whose pulls look ahead. Of a name with
    bf16 the master is bf16.
    """
    initial, made = {"w": np.zeros(n, np.float32)}, {}
    try:
        for name in ("sgd", "momentum", "adamw", "adagrad", "sgd, bf16", "adamw, bf16"):
            optimizer, _, kept = name.partition(", ")
            options = {"batches": [1, 1], "optimizer": optimizer, "master": kept or "f32"}
            options |= {"policy": "asp", "max_participants": 2}
            store = Store.create(f"bench-{os.getpid()}-{optimizer}{kept}", initial, **options)
            made[name], made[f"ahead, {name}"] = store, Store.open(store.name)
            store.join(0)
            made[f"ahead, {name}"].join(1)
            store.start()
            store.push(store.stage(), 1, HYPER)  # pulls look ahead from the first step on
        yield made
    finally:
        for store in reversed(made.values()):
            store.close()


def staged(store: Store, call: Callable[[Any], object]) -> Call:
    """A gradient is staged before the clock starts, as a trainer's is."""
    store.start()
    staging = store.stage()
    staging.flat.fill(1e-3)
    return lambda: call(staging)


def pulls(made: dict[str, Store], flat: Any, quantized: Any) -> Iterator[Operation]:
    sgd = made["sgd"]
    yield Operation("pull", 8, always(lambda: sgd.pull(flat)))
    for name, size, threshold in (("momentum", 12, 1.7), ("adamw", 16, None)):
        peer = made[f"ahead, {name}"]
        yield Operation(f"pull ahead, {name}", size, always(lambda s=peer: s.pull(flat)), threshold)
    yield Operation("pull int8", 5, always(lambda: sgd.pull_encoded(Codec.INT8, quantized)))
    yield Operation("pull, bf16 master", 6, always(lambda: made["sgd, bf16"].pull(flat)))


def pushes(made: dict[str, Store], flat: Any) -> Iterator[Operation]:
    """Time pushes of fp32 gradients, and exchanges."""
    whole = [(0, flat.size)]  # what backward has found finite

    def push(name: str, **options: Any) -> Callable[[], Call]:
        store = made[name]
        return lambda: staged(store, lambda staging: store.push(staging, 1, HYPER, **options))

    def exchange(**options: Any) -> Callable[[], Call]:
        sgd = made["sgd"]
        return lambda: staged(sgd, lambda staging: sgd.exchange(staging, 1, HYPER, flat, **options))

    yield Operation("SGD push", 12, push("sgd"), 1.6)
    yield Operation("SGD push, looked at in backward", 12, push("sgd", looked=whole), 1.6)
    yield Operation("SGD push, NaN as zeros", 12, push("sgd", encoding=SKIPPING))
    yield Operation("momentum push", 20, push("momentum"))
    yield Operation("AdamW push", 28, push("adamw"), 3.2)
    yield Operation("AdamW push, looked at in backward", 28, push("adamw", looked=whole), 3.2)
    yield Operation("AdamW push, NaN as zeros", 28, push("adamw", encoding=SKIPPING))
    yield Operation("Adagrad push", 20, push("adagrad"))
    yield Operation("SGD push, bf16 master", 8, push("sgd, bf16"))
    yield Operation("AdamW push, bf16 master", 24, push("adamw, bf16"))
    yield Operation("exchange, SGD", 16, exchange())
    yield Operation("exchange, SGD, looked at in backward", 16, exchange(looked=whole), 1.3)


def coded(sgd: Store, data: dict[Codec, Any], flat: Any) -> Iterator[Operation]:
    """Pushes and an exchange that decode codes that are there already, and apply them."""

    def prepare(codec: Codec, exchanges: bool = False) -> Call:
        sgd.start()
        staging = sgd.stage()
        sgd.backend.staging_codes(staging.index, data[codec].size)[:] = data[codec]
        request = PushRequest(staging.index, 1, (HYPER,), encoding=Encoding(codec), encoded=True)
        return lambda: sgd.send_and_pull(request, flat) if exchanges else sgd.send(request)

    yield Operation("int8 decode + SGD push", 9, partial(prepare, Codec.INT8), 1.05)
    yield Operation("int4 decode + SGD push", 8.5, partial(prepare, Codec.INT4))
    yield Operation("exchange, int8 + SGD", 13, partial(prepare, Codec.INT8, True))


def checkpoints(made: dict[str, Store]) -> Iterator[Operation]:
    adamw = made["adamw"]
    state = adamw.state()

    def restoring() -> Call:
        if "restored" in made:
            made.pop("restored").close()
        return lambda: made.update(restored=Store.create(f"{adamw.name}-restored", state=state))

    yield Operation("state of AdamW", 24, always(adamw.state))
    yield Operation("restore of AdamW", 24, restoring, STATE_VECTORS * 4.0)


def store_operations(made: dict[str, Store], gradient: Any) -> Iterator[Operation]:
    flat = np.zeros(made["sgd"].layout.flat_elements, np.float32)
    padded = np.zeros_like(flat)
    padded[: gradient.size] = gradient
    data = {codec: encode(padded, codec)[0] for codec in (Codec.INT8, Codec.INT4)}
    yield from pulls(made, flat, np.zeros_like(data[Codec.INT8]))
    yield from pushes(made, flat)
    yield from coded(made["sgd"], data, flat)
    yield from checkpoints(made)


def rivals(x: Any) -> Iterator[Operation]:
    """The same work by torch, DeepSpeed and bitsandbytes (if installed) and plain NumPy."""
    import torch

    set_rivals_threads(1)
    for name, kind, size in (("SGD", torch.optim.SGD, 12), ("AdamW", torch.optim.AdamW, 28)):
        for how in ("fused", "foreach"):
            parameter = torch.nn.Parameter(torch.zeros(x.size))
            parameter.grad = torch.full((x.size,), 1e-3)
            optimizer = kind([parameter], lr=1e-3, **{how: True})  # type: ignore[arg-type]
            prepare = partial(stepping, optimizer, parameter.grad)
            yield Operation(f"torch {name}, {how}", size, prepare, against=f"{name} push")
            if how == "fused":
                looks = partial(stepping, optimizer, parameter.grad, True)
                yield Operation(f"torch {name}, fused, and a look", size + 4, looks, against=f"{name} push")
    weights, gradient = np.zeros(x.size, np.float32), np.full(x.size, 1e-3, np.float32)
    numpy_sgd = always(lambda: np.subtract(weights, np.float32(1e-3) * gradient, out=weights))
    yield Operation("NumPy SGD", 12, numpy_sgd, against="SGD push")
    yield Operation("NumPy int8", 5, always(lambda: numpy_int8(x)), against="encode int8")
    if (found := deepspeed_adam(x.size)) is not None:
        for name, size, looks in (("", 28, False), (", and a look", 32, True)):
            prepare = partial(stepping, *found, looks)
            yield Operation(f"DeepSpeed CPUAdam{name}", size, prepare, against="AdamW push")
    try:
        from bitsandbytes import functional
    except ImportError:
        print("bitsandbytes is not installed: its rows are left out")
        return
    tensor = torch.from_numpy(x)
    int8 = always(lambda: functional.quantize_blockwise(tensor, blocksize=256))
    nf4 = always(lambda: functional.quantize_4bit(tensor, quant_type="nf4", blocksize=64))
    yield Operation("bitsandbytes int8, blocks of 256", 5, int8, against="encode int8")
    yield Operation("bitsandbytes NF4, blocks of 64", 4.5625, nf4, against="encode nf4")


def numpy_int8(x: Any) -> tuple[Any, Any]:
    """The codec's formula as one writes it in NumPy."""
    blocks = x[: x.size // 256 * 256].reshape(-1, 256)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    return np.rint(blocks * (127 / top)).astype(np.int8), top / 127


def two_at_once(rounds: int, call: Callable[[int], object]) -> tuple[float, float]:
    """Median seconds of one thread's calls, and of two threads' calls at the same time, interleaved."""

    def work(k: int, gate: threading.Barrier) -> None:
        gate.wait()
        for _ in range(REPEATS):
            call(k)
        gate.wait()

    times: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds + 1):
        for count, found in times.items():
            gate = threading.Barrier(count + 1)
            threads = [threading.Thread(target=work, args=(k, gate)) for k in range(count)]
            for thread in threads:
                thread.start()
            gate.wait()
            seconds = seconds_of(gate.wait)
            for thread in threads:
                thread.join()
            if number:
                found.append(seconds / REPEATS)
    return statistics.median(times[1]), statistics.median(times[2])


def concurrent(n: int, rounds: int) -> list[tuple[str, float, float]]:
    """Name, one thread's time, and how many times its throughput two threads reach."""
    found = []
    x = [np.random.default_rng(k).standard_normal(n).astype(np.float32) for k in range(2)]
    data = [np.zeros(encoded_bytes("int8", n), np.uint8) for _ in range(2)]
    copies = [np.zeros(n, np.float32) for _ in range(2)]
    name = f"bench-{os.getpid()}-two"
    with (
        Store.create(
            name, {"w": np.zeros(n, np.float32)}, batches=[1, 1], policy="asp", max_participants=4
        ) as one,
        Store.open(name) as other,
    ):
        workers = (one, other)
        flats = [np.zeros(one.layout.flat_elements, np.float32) for _ in workers]
        for store in workers:
            store.join()

        def push(k: int) -> None:
            workers[k].start()
            workers[k].push(workers[k].stage(), 1, HYPER)

        for label, call in (
            ("memcpy", lambda k: np.copyto(copies[k], x[k])),
            ("encode int8", lambda k: encode(x[k], "int8", out=data[k])),
            ("pull", lambda k: workers[k].pull(flats[k])),
            ("SGD push", push),
        ):
            alone, together = two_at_once(rounds, call)
            found.append((label, alone, 2 * alone / together))
    return found


def measure(operations: list[Operation], rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation, interleaved; two rounds to warm up are dropped."""
    times: dict[str, list[float]] = {operation.name: [] for operation in operations}
    for number in range(rounds + 2):
        for operation in operations:
            seconds = seconds_of(operation.prepare())
            if number >= 2:
                times[operation.name].append(seconds)
    return times


def rows(operations: list[Operation], times: dict[str, list[float]], n: int) -> list[list[str]]:
    memcpy = statistics.median(times["memcpy"])
    lines = [["operation", "bytes", "ms (range)", "GB/s", "x memcpy", "threshold"]]
    for operation in operations:
        seconds = statistics.median(times[operation.name])
        note = f"<= {operation.threshold:.2f}" if operation.threshold else ""
        if operation.against:
            note = f"{seconds / statistics.median(times[operation.against]):.2f} x our {operation.against}"
        size = operation.bytes_a_parameter
        speed = [f"{size * n / seconds / 1e9:.1f}", f"{seconds / memcpy:.2f}"]
        lines.append([operation.name, f"{size:.4g}", milliseconds(times[operation.name]), *speed, note])
    return lines


def draw(operations: list[Operation], times: dict[str, list[float]]) -> None:
    """A bar for each operation: its time over memcpy's; ours dark, others' light, thresholds as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    memcpy = statistics.median(times["memcpy"])
    shown = list(reversed(operations))
    ratios = [statistics.median(times[o.name]) / memcpy for o in shown]
    figure, axes = pyplot.subplots(figsize=(8, 0.27 * len(shown) + 1))
    axes.barh([o.name for o in shown], ratios, color=["0.75" if o.against else "0.25" for o in shown])
    for k, operation in enumerate(shown):
        if operation.threshold:
            axes.plot([operation.threshold] * 2, [k - 0.45, k + 0.45], color="tab:orange", linewidth=2)
    axes.set_xscale("log")
    axes.axvline(1.0, color="0.5", linewidth=0.8)
    axes.set_xlabel("time over memcpy's (log); light: others; orange: our threshold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(kept_at("core.png"), dpi=120)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    n = options.parameters
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    copy = np.zeros_like(x)
    with stores(n) as made:
        ours = [
            Operation("memcpy", 8, always(lambda: np.copyto(copy, x))),
            *codecs(x),
            *store_operations(made, x),
        ]
        times = measure(ours, options.rounds)
    theirs = list(rivals(x))
    times |= measure(theirs, max(1, options.rounds // 2))
    both = concurrent(n, options.rounds)
    lines = [["two threads at once", "one alone, ms", "throughput of two"]]
    lines += [[name, f"{1e3 * alone:.1f}", f"{ratio:.2f} x one"] for name, alone, ratio in both]
    head = f"{machine()}; {n:,} fp32 parameters.\n\n"
    text = f"{head}{table(rows(ours + theirs, times, n))}\n\n{table(lines)}"
    threads = head + shared(n, options.rounds)
    print(f"{text}\n\n{threads}")
    if options.save:
        if "PYPS_ISA" not in os.environ:
            draw(ours + theirs, times)
        save_table(f"core-{isa()}", text)
        save_table(f"threads-{isa()}", threads)


if __name__ == "__main__":
    main()
