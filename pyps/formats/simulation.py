"""The [simulation] table of a cluster file: what virtual time needs to know beside the devices."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pyps.formats.kinds import Bytes, Elapsed, Name

Above = Annotated[float, Meta(gt=0)]


class Jitter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes steps of one device unlike: a lognormal factor of mean 1, a uniform one within 1 +-
    `spread`, a spike (`spike_factor` times as long) in a share of the steps, and a slow sine of relative
    amplitude `drift`.
    """

    sigma: Elapsed = 0.0
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    spike_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    spike_factor: Above = 10.0
    drift: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    drift_seconds: Above = 60.0


class Host(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that share one link to the server; bandwidth in bytes/s each way. A group's name stands for all
    its ranks.
    """

    name: Name
    bandwidth: Above
    workers: Annotated[list[Name], Meta(min_length=1)]


class Happening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What befalls a worker `at` seconds. slow: for `seconds` (0: to the end) steps take `factor` times as
    long and `added` seconds more, as beside a co-tenant. stop: it stands still for `seconds`. kill: it dies,
    and a successor joins after `seconds` (0: never). leave: it goes, in the same way.
    """

    worker: Name
    at: Elapsed
    kind: Literal["slow", "stop", "kill", "leave"]
    seconds: Elapsed = 0.0
    factor: Above = 1.0
    added: Elapsed = 0.0


class Simulation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model_bytes` travel each way in a step, at fp32; unknown: from the profiles' parameters, else none.

    `servers` hold equal shares of the model, each with a link of `server_bandwidth` bytes/s.
    """

    model_bytes: Bytes | None = None
    server_bandwidth: Above | None = None
    servers: Annotated[int, Meta(ge=1)] = 1
    jitter: Jitter = Jitter()
    host: list[Host] = []
    happening: list[Happening] = []
