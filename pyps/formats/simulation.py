"""The [simulation] table of a cluster file: links, noise and faults of a run in virtual time."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.formats.kinds import Bytes, Elapsed, Name

Above = Annotated[float, Meta(gt=0)]


class Jitter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Noise in the time of a device's steps; every step's time is multiplied by all of these factors.

    sigma: of a lognormal factor with mean 1.
    spread: of a uniform factor within 1 +- spread.
    half_normal: of a factor 1 + half_normal * |N(0, 1)|.
    spike_share, spike_factor: this share of the steps takes spike_factor times as long.
    drift, drift_seconds: relative amplitude and period of a sine.
    """

    sigma: Elapsed = 0.0
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    half_normal: Elapsed = 0.0
    spike_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    spike_factor: Above = 10.0
    drift: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    drift_seconds: Above = 60.0


class Host(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that share one link to the server; `bandwidth` in bytes/s each way.

    The name of a group of workers stands for all of them.
    """

    name: Name
    bandwidth: Above
    workers: Annotated[list[Name], Meta(min_length=1)]


class FaultSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of a worker, `at` seconds after the start.

    slow: for `seconds` (0: to the end) steps take `factor` times as long and `added` seconds more.
    stop: the worker is stopped for `seconds`.
    kill, leave: the worker dies or leaves, and a new one joins after `seconds` (0: never).
    """

    worker: Name
    at: Elapsed
    kind: Literal["slow", "stop", "kill", "leave"]
    seconds: Elapsed = 0.0
    factor: Above = 1.0
    added: Elapsed = 0.0


class Simulation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster beyond its devices.

    model_bytes: sent each way in a step, at fp32; None: from the profiles' parameters, else 0.
    servers: each holds an equal share of the model.
    server_bandwidth: of each server's link, in bytes/s.
    """

    model_bytes: Bytes | None = None
    server_bandwidth: Above | None = None
    servers: Annotated[int, Meta(ge=1)] = 1
    jitter: Jitter = Jitter()
    host: list[Host] = []
    fault: list[FaultSpec] = []
