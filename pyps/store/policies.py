"""Policies as frozen, checked values. Their decisions run in C (csrc/policy/).

A new policy is a class here with the number that pyps.h gives it; nothing else in Python knows it by name.
In text a policy is its name and what differs from the defaults: `ssp`, `saps:threshold=fixed,bound=8`.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import sys
from collections.abc import MutableSequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from pyps import native
from pyps.errors import InputError, UnknownPolicy, one_of
from pyps.formats.mode import ROUND, Pace
from pyps.native.core import is_registered, register_decider
from pyps.native.decisions import NO_BOUND, PolicyContext, PolicyNeeds, PolicyParams

Threshold = Literal["fixed", "quantile", "ringmaster", "measured"]
Late = Literal["drop", "weigh", "auto"]
Scaling = Literal["samples", "none"]
CUSTOM = 12  # PYPS_CUSTOM
MOST_COUNT = NO_BOUND - 1
MOST_EXTRA = 10_000  # they are tried one by one
COMMON = ("round_timeout_seconds",)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Hold what every policy has.

    `round_timeout_seconds`: a live worker that holds up the others for longer is fenced. Calls without
    a timeout wait for twice as long. `scaling`: what a push takes of an optimizer step, where no round
    waits for all: "samples", its part of a global batch; "none", a whole one, for scripts that scale the
    learning rate. `lookahead`: there, and unless scaling is "none", a worker pulls the parameters as momentum
    and gradients like its last one will have moved them when its next one is admitted; in a pipeline of
    rounds, as momentum and its gradients under way. Raises InputError for a value out of its range.
    """

    round_timeout_seconds: float = 60.0
    scaling: Scaling = "samples"
    lookahead: bool = True

    name: ClassVar[str]
    number: ClassVar[int]
    known: ClassVar[dict[str, type[Policy]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.number != CUSTOM:
            Policy.known[cls.name] = cls

    def __post_init__(self) -> None:
        self._check("round_timeout_seconds", 1e-9, 1e9)
        self._check_choice("scaling", Scaling)

    @property
    def pace(self) -> Pace:
        """Return what its workers wait for, as the planner counts it."""
        return Pace("free")

    @property
    def looks_ahead(self) -> bool:
        """Return whether pulls look ahead, where gradients come late."""
        return self.lookahead and self.scaling == "samples"

    def params(self) -> PolicyParams:
        """The policy's numbers, as the C core takes them."""
        scaling, plain = get_args(Scaling).index(self.scaling), not self.lookahead
        return replace(self._params(), scaling=scaling, plain_pulls=int(plain))

    def _params(self) -> PolicyParams:
        """Return those that this policy alone has."""
        return PolicyParams()

    @cached_property
    def needs(self) -> PolicyNeeds:
        """Return what the policy asks of its workers."""
        return native.policy_needs(self.number, self.params())

    def __str__(self) -> str:
        changed = (f for f in fields(self) if f.name not in COMMON and getattr(self, f.name) != f.default)
        numbers = ",".join(f"{f.name}={_text(getattr(self, f.name))}" for f in changed)
        return f"{self.name}:{numbers}" if numbers else self.name

    def _check(self, field: str, least: float, most: float) -> None:
        """The limits are the core's (csrc/policy), which has other names for some fields."""
        if not (isinstance(value := getattr(self, field), int | float) and least <= value <= most):
            raise InputError(self.name, field, repr(value), f"a number from {least:g} to {most:.15g}")

    def _check_choice(self, field: str, choices: Any) -> None:
        if (value := getattr(self, field)) not in get_args(choices):
            raise InputError(self.name, field, repr(value), one_of(str(value), get_args(choices)))

    def _check_count(self, field: str, least: int, *, most: int = MOST_COUNT, infinite: bool = False) -> None:
        value = getattr(self, field)
        if infinite and value == math.inf:
            return
        if not (isinstance(value, int) and least <= value <= most):
            or_inf, to = ", or inf" if infinite else "", f" and at most {most}" if most < MOST_COUNT else ""
            raise InputError(self.name, field, repr(value), f"a whole number of at least {least}{to}{or_inf}")


@dataclass(frozen=True, kw_only=True)
class BSP(Policy):
    """Bulk synchronous: one step from all workers' gradients, weighted by samples, bitwise reproducible."""

    name: ClassVar[str] = "bsp"
    number: ClassVar[int] = 0

    @property
    def pace(self) -> Pace:
        return ROUND


@dataclass(frozen=True, kw_only=True)
class ASP(Policy):
    """Asynchronous: every gradient is applied at once, however old its parameters were."""

    name: ClassVar[str] = "asp"
    number: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class Backup(Policy):
    """BSP that closes a round without the `k` slowest; their samples go back, their gradients are dropped."""

    k: int = 1

    name: ClassVar[str] = "backup"
    number: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("k", 0)

    @property
    def pace(self) -> Pace:
        return Pace("round", spare=self.k)

    def _params(self) -> PolicyParams:
        return PolicyParams(backup=self.k)


@dataclass(frozen=True, kw_only=True)
class Softsync(Policy):
    """A version from every floor(N / n) gradients, from any workers, each 1 / staleness of a step."""

    n: int = 1

    name: ClassVar[str] = "softsync"
    number: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("n", 1, most=1_000_000)

    def _params(self) -> PolicyParams:
        return PolicyParams(splits=self.n)


@dataclass(frozen=True, kw_only=True)
class SSP(Policy):
    """Stale synchronous: no worker is more than `bound` steps ahead of the slowest; inf: never waits."""

    bound: float = 3

    name: ClassVar[str] = "ssp"
    number: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("bound", 0, infinite=True)

    @property
    def pace(self) -> Pace:
        return Pace("free" if self.bound == math.inf else "clock")

    def _params(self) -> PolicyParams:
        return PolicyParams(bound=_bound(self.bound))


@dataclass(frozen=True, kw_only=True)
class DSSP(Policy):
    """SSP with a bound that moves: past `bound` the fastest may go up to `extra` steps further, as many as
    are predicted to leave it the shortest wait.
    """

    bound: int = 3
    extra: int = 12

    name: ClassVar[str] = "dssp"
    number: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("bound", 0)
        self._check_count("extra", 0, most=MOST_EXTRA)

    @property
    def pace(self) -> Pace:
        return Pace("clock")

    def _params(self) -> PolicyParams:
        return PolicyParams(bound=self.bound, extra=self.extra)


@dataclass(frozen=True, kw_only=True)
class DynSGD(Policy):
    """ASP with gradients weighed by 1 / (staleness + 1) over its mean; unlike batches count in proportion."""

    name: ClassVar[str] = "dynsgd"
    number: ClassVar[int] = 6


@dataclass(frozen=True, kw_only=True)
class SaPS(Policy):
    """Straggler-aware: gradients of a staleness above a threshold are weighed or dropped; no worker waits.

    threshold: "measured" (from the workers' times), "ringmaster" (the number of workers, or more where
    gradients are noisy), "quantile" (of the stalenesses seen, but at least the number of workers) or "fixed"
    (`bound`; inf: ASP). late: "drop" later gradients, or "weigh" them by threshold / staleness; "auto":
    weigh those later than a measured threshold, unless workers may abort. noise: what "measured" takes for
    the variance of a gradient over the squared length of the true one; None: as measured. abort: a late
    worker learns between micro-batches that its gradient would be dropped, instead of when it is done.
    """

    threshold: Threshold = "measured"
    bound: float = math.inf
    quantile: float = 0.9
    abort: bool = False
    late: Late = "auto"
    noise: float | None = None

    name: ClassVar[str] = "saps"
    number: ClassVar[int] = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("threshold", Threshold)
        self._check_choice("late", Late)
        self._check_count("bound", int(self._weighs), infinite=True)
        if self.bound != math.inf and self.threshold != "fixed":
            raise InputError(self.name, "bound", repr(self.bound), "threshold=fixed with it")
        if not 0.01 <= self.quantile <= 0.999:
            raise InputError(self.name, "quantile", repr(self.quantile), "0.01 to 0.999")
        if self.abort and self._weighs:
            raise InputError(self.name, "abort", "true with late=weigh", "late=drop, or no abort")
        if self.noise is not None:
            self._check("noise", 0.0, 1e9)

    @property
    def _weighs(self) -> bool:
        automatic = self.threshold == "measured" and not self.abort
        return self.late == "weigh" or (self.late == "auto" and automatic)

    def _params(self) -> PolicyParams:
        return PolicyParams(
            bound=_bound(self.bound),
            threshold=get_args(Threshold).index(self.threshold),
            abort=int(self.abort),
            quantile=self.quantile,
            late=int(self._weighs),
            noise=-1.0 if self.noise is None else float(self.noise),
        )


@dataclass(frozen=True, kw_only=True)
class R2SP(Policy):
    """Round robin: push and pull in turn, in order and gaps of the plan or of Store.set_schedule, else
    by rank, a gap of (slowest cycle) / N apart. `slack` divides the gaps; 0: none.

    A worker that does not take its turn within `patience` times the slowest cycle is passed over until it is
    ready again.
    """

    slack: float = 1.0
    patience: float = 2.0

    name: ClassVar[str] = "r2sp"
    number: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("slack", 0.0, 1e6)
        self._check("patience", 0.1, 1e6)

    @property
    def pace(self) -> Pace:
        return Pace("turns")

    def _params(self) -> PolicyParams:
        return PolicyParams(slack=float(self.slack), patience=float(self.patience))


@dataclass(frozen=True, kw_only=True)
class HPS(Policy):
    """BSP with tasks that are sized anew for each round by measured speed, within each worker's memory."""

    name: ClassVar[str] = "hps"
    number: ClassVar[int] = 11

    @property
    def pace(self) -> Pace:
        return Pace(sized=True)


@dataclass(frozen=True, kw_only=True)
class Quorum(Policy):
    """BSP that does not wait for the `k` slowest longer than `grace` times what all others took.

    They go on, and what they push is merged in the round that is open then: no sample is lost or repeated.
    """

    k: int = 1
    grace: float = 0.5

    name: ClassVar[str] = "quorum"
    number: ClassVar[int] = 13

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("k", 0)
        self._check("grace", 0.0, 1e6)

    @property
    def pace(self) -> Pace:
        return ROUND

    def _params(self) -> PolicyParams:
        return PolicyParams(backup=self.k, own=float(self.grace))


@dataclass(frozen=True, kw_only=True)
class Custom(Policy):
    """Base of custom policies: a frozen dataclass in a module that workers can import, with either method.

    `words` are 16 whole numbers below 2^64 that all workers share, 0 at first, the only memory there is. A
    method may be asked again, by any worker, and must depend on nothing but itself and its arguments.
    """

    name: ClassVar[str] = "custom"
    number: ClassVar[int] = CUSTOM

    def __init_subclass__(cls) -> None:
        cls.name = f"{cls.__module__}.{cls.__qualname__}"

    def may_start(self, context: PolicyContext, shared_state: MutableSequence[int]) -> bool:
        """Return whether a worker may begin a step now; words that change are kept if it may."""
        return True

    def scale(self, context: PolicyContext, shared_state: MutableSequence[int]) -> float | None:
        """Return what a gradient is multiplied by; None: it is dropped, its samples go back."""
        return 1.0

    def _params(self) -> PolicyParams:
        text = str(self).encode()
        return PolicyParams(custom=int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))


def _bound(value: float) -> int:
    return NO_BOUND if value == math.inf else int(value)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


DEFAULT_POLICY: Policy = BSP()


def register_policy(policy: Policy) -> None:
    """Register a custom policy with the core of this process."""
    if isinstance(policy, Custom):
        register_decider(policy.params().custom, policy)


def policy_name(number: int) -> str:
    """The name of the policy that pyps.h gives this number; "custom" where only its creator knows one."""
    names = {kind.number: name for name, kind in Policy.known.items()}
    return names.get(number, Custom.name)


def check_known(number: int, params: PolicyParams) -> None:
    """Raise UnknownPolicy for a store of a custom policy that this process has not registered."""
    if number == CUSTOM and not is_registered(params.custom):
        raise UnknownPolicy("join", "this process has not registered the store's custom policy")


def policy_named(text: str, round_timeout_seconds: float = 60.0, source: str = "policy") -> Policy:
    """The policy that a text says, e.g. "bsp" or "ssp:bound=4".

    source: where the text stands: an option, or a file and its key. Raises InputError with what there is.
    """
    try:
        return _policy_of(text, round_timeout_seconds)
    except InputError as error:
        where = source if error.where == "policy" else f"{source}: {error.where}"
        raise InputError(where, error.field, error.found, error.expected) from error.__cause__


def _policy_of(text: str, round_timeout_seconds: float) -> Policy:
    name, _, rest = text.partition(":")
    kind = Policy.known.get(name) or _imported(name)
    if kind is None:
        raise InputError("policy", "", repr(name), one_of(name, Policy.known))
    own = {f.name: f for f in fields(kind) if f.name not in COMMON and f.default is not MISSING}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in own:
            expected = f"key=value, where key is {one_of(key, own)}"
            raise InputError(name, "", repr(item), expected)
        values[key] = _parsed(name, key, value, own[key].default)
    return kind(round_timeout_seconds=round_timeout_seconds, **values)


def _imported(name: str) -> type[Policy] | None:
    """The Custom at a dotted path, the current folder searched first; None if there is no such thing."""
    module, _, qualified = name.rpartition(".")
    if not module or module.startswith("."):
        return None
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), qualified, None)
    except Exception as error:  # a module runs when it is imported
        found = f"{name!r}: {type(error).__name__}: {error}"
        raise InputError("policy", "", found, "module.Class of a pyps.Custom") from None
    finally:
        sys.path.remove(os.getcwd())
    return found if isinstance(found, type) and issubclass(found, Custom) else None


def _parsed(name: str, key: str, text: str, default: object) -> object:
    """A value of the kind that the default is of."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise InputError(name, key, repr(text), "true or false")
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(name, key, repr(text), "a number") from None


def check_pipeline(policy: Policy, source: str = "depth") -> None:
    """Raise InputError for a policy that does not allow a pipeline; source: what asks for one."""
    if not policy.needs.allows_pipeline:
        able = ", ".join(name for name, kind in Policy.known.items() if kind().needs.allows_pipeline)
        found = f"a pipeline under {policy.name}, where every step waits for the one before it"
        raise InputError(source, "", found, f"1, or one of {able}")
