"""From a torch model and optimizer to the store's tensors and groups, and back.

The store holds, as fp32, every parameter that requires a gradient and that the optimizer has; tied
parameters are one object, held once. After them come the buffers of `averages`, in groups of their own.
Frozen and empty parameters, and those that the optimizer does not have, stay local. A model or option that
cannot be trained is refused by name.

The torch optimizer's options are read, and its step() changes nothing, since the store steps. Schedulers and
scalers want to see step() called once a step: the worker calls it when all gradients have been taken away,
and refuses a call by the training script.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pyps.checkpoint.folder import newest_checkpoint
from pyps.checkpoint.local_states import without_moments
from pyps.checkpoint.state import Saved
from pyps.checkpoint.state import load as load_checkpoint
from pyps.errors import InputError, NotReady, SegmentExists, SegmentNotFound, ShardLost
from pyps.formats.events import Undone, append_undone
from pyps.formats.plan import TurnSchedule
from pyps.formats.records import read_records
from pyps.native.values import Hyper, Optimizer, Snapshot, Tensor
from pyps.remote import create_store, open_store
from pyps.remote.address import is_address, is_sharded
from pyps.store.creation import kept_as
from pyps.store.store import Store
from pyps.worker.device.averages import DTYPES, Averaged, find_buffers, plain_name, put
from pyps.worker.run.settings import Settings, agreement_of

OWN_HOOKS = 2  # of each optimizer
OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
KINDS = {
    torch.optim.SGD: Optimizer.SGD,
    torch.optim.AdamW: Optimizer.ADAMW,
    torch.optim.Adam: Optimizer.ADAM,
    torch.optim.Adagrad: Optimizer.ADAGRAD,
}
REFUSED_OPTIONS = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
POLL_SECONDS = 0.02, 0.2  # at first and later; only while the segment does not exist yet
USUAL = Hyper(0.0)  # what a group that lacks a constant has
constants = lru_cache(maxsize=256)(Hyper)  # one object for equal ones, as they are from step to step


@dataclass(frozen=True)
class Entry:
    """One parameter of the store; `group` counts the optimizer's groups that have any."""

    name: str
    parameter: nn.Parameter
    group: int


@dataclass(frozen=True)
class Attachment:
    """Hold what of a model lives in the store: entries, the kind of step, the optimizer's groups in use."""

    entries: tuple[Entry, ...]
    kind: Optimizer
    groups: tuple[int, ...]  # store group -> index into optimizer.param_groups
    optimizer: torch.optim.Optimizer
    buffers: tuple[tuple[Averaged, ...], ...] = ()  # groups after those
    clip_norm: float = 0.0  # 0: no clipping
    master: str | None = None  # how a new store keeps parameters; None: as its state says

    def tensors(self) -> dict[str, tuple[Tensor, torch.Tensor]]:
        """Return what the store holds, in its order: name -> (its description, its values)."""
        trained = {
            e.name: (Tensor(e.name, tuple(e.parameter.shape), e.group), e.parameter.detach())
            for e in self.entries
        }
        averaged = {
            b.name: (Tensor(b.name, tuple(b.value.shape), group, averaged=True), b.value)
            for group, buffers in enumerate(self.buffers, len(self.groups))
            for b in buffers
        }
        return {**trained, **averaged}


def inspect(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> Attachment:
    """Decide what goes where. clip_norm: the bound of the gradient's norm, None for none. Raises InputError,
    naming the parameter or option, for what cannot be trained.
    """
    if type(model).__name__ in WRAPPERS:
        raise InputError("attach", "model", type(model).__name__, "the plain module: the store synchronises")
    if clip_norm is not None and not 0.0 < clip_norm < math.inf:
        raise InputError("attach", "clip_norm", repr(clip_norm), "a finite number above 0, or None")
    kind = _kind(optimizer)
    group_of = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = {id(p): name for name, p in model.named_parameters()}
    for k, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in named:
                found = f"a parameter of shape {list(p.shape)} that the model does not have"
                raise InputError("attach", f"optimizer.param_groups[{k}]", found, "parameters of the model")
    chosen = [
        (plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad and id(p) in group_of
    ]
    for name, p in chosen:
        _check_parameter(name, p)
    chosen = [(name, p) for name, p in chosen if p.numel() > 0]
    if not chosen:
        raise InputError("attach", "model", "no parameter to train", "one that the optimizer has")
    _check_overlap(chosen)
    groups = tuple(sorted({group_of[id(p)] for _, p in chosen}))
    entries = tuple(Entry(name, p, groups.index(group_of[id(p)])) for name, p in chosen)
    return Attachment(entries, kind, groups, optimizer, find_buffers(model), clip_norm or 0.0)


def _kind(optimizer: torch.optim.Optimizer) -> Optimizer:
    if type(optimizer) not in KINDS:
        expected = "torch.optim.SGD, AdamW, Adam or Adagrad"
        raise InputError("attach", "optimizer", type(optimizer).__name__, expected)
    for k, group in enumerate(optimizer.param_groups):
        for option in REFUSED_OPTIONS:
            if value := group.get(option):
                raise InputError("attach", f"optimizer.param_groups[{k}].{option}", repr(value), "False or 0")
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        expected = "a new one: the store keeps the state"
        raise InputError("attach", "optimizer", "state of earlier steps", expected)
    kind = KINDS[type(optimizer)]
    if kind is Optimizer.ADAM and any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    ):
        return Optimizer.ADAMW
    if kind is not Optimizer.SGD:
        return kind
    momentum = any(group["momentum"] > 0 for group in optimizer.param_groups)
    return Optimizer.MOMENTUM if momentum else Optimizer.SGD


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if isinstance(p, nn.parameter.UninitializedParameter):
        raise InputError("attach", name, "a lazy parameter", "one with a shape: run the model once before")
    if p.layout is not torch.strided:
        raise InputError("attach", name, f"layout {p.layout}", "a dense parameter")
    if p.dtype not in DTYPES:
        raise InputError("attach", name, f"dtype {p.dtype}", "float32, float16 or bfloat16 (kept as fp32)")
    if p.is_meta:
        raise InputError("attach", name, "a meta tensor", "a parameter with values")


def _check_overlap(chosen: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse two Parameter objects over the same memory, which would become two: tie the objects instead."""
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in chosen)
    for (device, _, end, name), (next_device, begin, _, other) in pairwise(spans):
        if device == next_device and begin < end:
            expected = "separate memory, or one nn.Parameter object used in both places"
            raise InputError("attach", other, f"memory shared with {name}", expected)


def hyper_of(attachment: Attachment) -> tuple[Hyper, ...]:
    """The constants of this step, as the optimizer's groups (and so any schedule) have them now.

    Raises InputError if a schedule raises momentum in a store made without it.
    """
    return tuple(_constants(k, attachment.optimizer.param_groups[k], attachment) for k in attachment.groups)


def _constants(index: int, group: dict[str, Any], attachment: Attachment) -> Hyper:
    momentum = float(group.get("momentum", 0.0))
    if momentum > 0.0 and attachment.kind is Optimizer.SGD:
        where = f"optimizer.param_groups[{index}].momentum"
        raise InputError("step", where, str(momentum), "momentum above 0 from the beginning, or never")
    first, second = group.get("betas", USUAL.betas)
    return constants(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        betas=(float(first), float(second)),
        eps=float(group.get("eps", USUAL.eps)),
        lr_decay=float(group.get("lr_decay", 0.0)),
        momentum=momentum,
        # torch ignores dampening where there is no momentum; the store's momentum buffer must see none either
        dampening=float(group["dampening"]) if momentum > 0.0 else 0.0,
        nesterov=momentum > 0.0 and bool(group["nesterov"]),
        clip_norm=attachment.clip_norm,
    )


def check_same(store: Store, attachment: Attachment) -> None:
    """Raise InputError, naming the first tensor that differs, if the store was made from another model."""
    where = f"store {store.name!r}"
    for mine, theirs in zip_longest((t for t, _ in attachment.tensors().values()), store.tensors):
        here = _described(mine) if mine else "nothing"
        there = _described(theirs) if theirs else "nothing more"
        if here != there:
            field = mine.name if mine else theirs.name
            raise InputError(where, field, f"{here} in this worker's model", f"{there}, as in the store")
    if attachment.kind is not store.layout.optimizer:
        found, expected = attachment.kind.name.lower(), store.layout.optimizer.name.lower()
        raise InputError(where, "optimizer", found, f"{expected}, as in the store")
    if attachment.master is not None and kept_as("attach", attachment.master) is not store.layout.master:
        expected = f"{store.layout.master.name.lower()}, as in the store"
        raise InputError(where, "master", attachment.master, expected)


def open_or_create(settings: Settings, attachment: Attachment, timeout: float) -> Store:
    """Open the store. Rank 0 creates it unless it exists (after a restart); the others wait for it. Where it,
    or a shard of it, was lost elsewhere, rank 0 makes it again from the run's last checkpoint.

    Raises InputError for clip_norm on several servers.
    """
    if attachment.clip_norm and is_sharded(settings.store):
        expected = "None: the norm is of the whole gradient, which no single server has"
        raise InputError("attach", "clip_norm", f"{attachment.clip_norm:g}, on several servers", expected)
    deadline = time.monotonic() + timeout
    pause, longest = POLL_SECONDS
    while True:
        try:
            return open_store(settings.store)
        except (SegmentNotFound, NotReady) as error:
            if settings.rank == 0:
                saved = _last_checkpoint(settings) if is_address(settings.store) else settings.resume
                if isinstance(error, ShardLost) and saved is None:
                    raise
                try:
                    return _create(settings, attachment, saved)
                except SegmentExists:
                    pass  # another process was faster: open its segment
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def set_planned_turns(store: Store, settings: Settings) -> None:
    """Rank 0, before it joins and so before any turn, sets the plan's turns, unless they are set or other
    ranks have joined the run.
    """
    if settings.rank != 0 or settings.schedule is None:
        return
    status = store.status()
    if not status.scheduled and status.ranks == len(settings.schedule.order):
        store.set_schedule(settings.schedule)


def _last_checkpoint(settings: Settings) -> Path | None:
    """The newest one of the run; else the one that it went on from."""
    found = None if settings.run_dir is None else newest_checkpoint(Path(settings.run_dir))
    return found or settings.resume


def _last_recorded(settings: Settings) -> int:
    """The last version that the records of this host know."""
    paths = [] if settings.run_dir is None else sorted(settings.run_dir.glob("worker-*.jsonl"))
    return max((record.version for path in paths for record in read_records(path)), default=0)


def _report_undone(store: Store, settings: Settings, saved: Saved, last: int) -> None:
    """Warn of the pushes that the lost store had after the checkpoint, and note them for the report.

    last: the last version that is known, if its servers know none.
    """
    version = saved.state.header.version
    undone = max(store.undone, last - version)
    if undone <= 0:
        return
    if settings.run_dir is not None:
        append_undone(settings.run_dir, Undone(version, undone))
    if not store.undone:  # else it has said so
        lost = f"it goes on from {saved.path}, {undone} pushes after version {version} are undone"
        warnings.warn(f"store {settings.store!r} was lost: {lost}", stacklevel=4)


def _create(settings: Settings, attachment: Attachment, resume: Path | None) -> Store:
    tensors = attachment.tensors()
    saved = _saved(settings, resume) if resume is not None else None
    last = _last_recorded(settings) if resume != settings.resume else 0  # before others drop theirs
    store = create_store(
        settings.store,
        {name: values for name, (_, values) in tensors.items()},
        state=saved.state if saved is not None else None,
        batches=settings.planned_batches(),
        optimizer=attachment.kind,
        policy=settings.policy,
        groups={name: tensor.group for name, (tensor, _) in tensors.items()},
        averaged=[name for name, (tensor, _) in tensors.items() if tensor.averaged],
        master=attachment.master,
        samples=settings.samples if settings.launched or settings.samples else None,
        staging_buffers=settings.staging_buffers,
        keep=settings.launched,
        agreement=agreement_of(settings),
    )
    if saved is not None:
        _report_undone(store, settings, saved, last)
        _take_edited_turns(store, settings.schedule, saved)
    return store


def _take_edited_turns(store: Store, planned: TurnSchedule | None, saved: Saved) -> None:
    """Turns of the plan, where it was edited since, win over those of the checkpoint; a warning says so."""
    if planned is None or not store.status().scheduled:
        return
    ranks = saved.state.header.ranks
    if planned.order == tuple(rank.turn_rank for rank in ranks) and all(
        abs(gap - rank.turn_gap * 1e-9) < 1e-6 for gap, rank in zip(planned.gaps_seconds, ranks, strict=True)
    ):
        return
    store.set_schedule(planned)
    warnings.warn(f"store {store.name!r}: the plan's turns replace those of {saved.path}", stacklevel=4)


def _saved(settings: Settings, resume: Path) -> Saved:
    """The checkpoint to go on from. Raises InputError if its samples were in another order."""
    saved = load_checkpoint(resume)
    if not settings.launched and saved.checkpoint.seed not in (None, settings.seed):
        expected = f"{saved.checkpoint.seed}, as in {saved.path}"
        raise InputError("join", "seed", str(settings.seed), expected)
    return saved


def _described(tensor: Tensor) -> str:
    kind = "averaged " if tensor.averaged else ""
    return f"{kind}{tensor.name!r} {list(tensor.shape)} of group {tensor.group}"


def load_parameters(source: Store | Snapshot, model: nn.Module) -> int:
    """Copy one version's parameters and averaged buffers into a model (any device, any dtype); the version.

    What is not in the store keeps its values. Raises InputError if the store has a tensor that the model
    lacks or has in another shape.
    """
    snapshot = source.snapshot() if isinstance(source, Store) else source
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    targets: dict[str, torch.Tensor] = {plain_name(name): value for name, value in named.items()}
    tensors = without_moments(snapshot.tensors)
    for name, values in tensors.items():
        found = list(targets[name].shape) if name in targets else "nothing"
        if found != list(values.shape):
            raise InputError("load_parameters", name, f"{found} in the model", f"shape {list(values.shape)}")
    for name, values in tensors.items():
        put(targets[name], torch.from_numpy(values))
    return snapshot.version


def as_optimizers(
    given: OptimizerArgument, model: torch.nn.Module, *, is_local: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that attach() was given, in their order; None: SGD with torch's defaults.

    is_local: they take local steps. Raises InputError for what is no optimizer, for several without local
    steps, for a parameter that two of them have, and for one whose step() computes gradients by itself.
    """
    if given is None:
        return (torch.optim.SGD(model.parameters()),)
    found = list(given) if isinstance(given, Sequence) else [given]
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError("attach", "optimizer", type(one).__name__, "a torch.optim.Optimizer, or several")
    if not found or (len(found) > 1 and not is_local):
        names = f"{len(found)} of them{': ' * bool(found)}{', '.join(type(one).__name__ for one in found)}"
        raise InputError("attach", "optimizer", names, "one; with local steps one or more")
    named = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    for one in found:
        closure = signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            expected = "an optimizer that steps with the gradients that are there"
            raise InputError("attach", "optimizer", f"{type(one).__name__}, which needs a closure", expected)
        mine = {id(p) for group in one.param_groups for p in group["params"]}
        for shared in mine & seen:
            which = f"{named.get(shared, 'a parameter')} in two optimizers"
            raise InputError("attach", "optimizer", which, "each parameter in one")
        seen |= mine
    return tuple(found)


class OptimizerSteps:
    """Calls of one optimizer's step(). Refuses every other call of it from now on with InputError.

    parameters: those in the store. call() refuses a gradient of any other, which would be stepped here alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._stored = {id(parameter) for parameter in parameters}
        self._allowed = self._stepped = False
        optimizer.register_step_pre_hook(self._check_caller)
        optimizer.register_step_post_hook(self._note)

    def unscale(self, scaler: Any) -> None:
        """Let a GradScaler unscale the gradients, unless the training script has already done so."""
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            raise InputError("step", "optimizer.fused", "True", "False where a GradScaler is used")
        with suppress(RuntimeError):  # unscaled since the last update(), or misused: then step() raises, too
            scaler.unscale_(self._optimizer)

    def call(self, scaler: Any = None) -> bool:
        """Call step() with no gradients left; False if the scaler found some that were not finite.

        A GradScaler calls step() only if all gradients were finite. Without gradients, and where nothing
        sees the call, none is made: torch's takes longer than all that a small push does.
        """
        is_empty = self._check_stored()
        if is_empty and scaler is None and not self._is_watched():
            return True
        self._allowed, self._stepped = True, False
        try:
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)
        finally:
            self._allowed = False
        return self._stepped

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def _is_watched(self) -> bool:
        """Return whether a scheduler or a hook other than ours sees calls of step()."""
        one: Any = self._optimizer
        hooks = len(one._optimizer_step_pre_hooks) + len(one._optimizer_step_post_hooks)
        everywhere = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
        return "step" in vars(one) or hooks + everywhere > OWN_HOOKS

    def _check_stored(self) -> bool:
        """Return whether there are no gradients."""
        is_empty = True
        for k, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                is_empty = False
                if p.numel() and id(p) not in self._stored:
                    found = f"a gradient of a parameter of shape {list(p.shape)} that is not in the store"
                    expected = (
                        "in the optimizer, with requires_grad, when attach() is called (with lr 0 until then)"
                    )
                    raise InputError("step", f"optimizer.param_groups[{k}]", found, expected)
        return is_empty

    def _check_caller(self, *_: Any) -> None:
        if not self._allowed:
            expected = "worker.step(): the store steps"
            raise InputError("optimizer", "step", "a call of optimizer.step()", expected)
