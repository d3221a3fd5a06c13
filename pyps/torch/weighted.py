"""WeightedHook: a model whose gradients count by samples, as Rebalancer, timer and checkpoint know it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.gathered import watch
from pyps.torch.lockstep import Lockstep, refused_by
from pyps.torch.norm import UnevenSyncBatchNorm, sees_own_batch_alone
from pyps.torch.passes import DEPTH, Passes
from pyps.torch.peers import all_copies, parameters_of, peers_of
from pyps.torch.rounds import Rounds, TrainedRounds
from pyps.torch.shapes import BITS, Shape, Shapes, attached
from pyps.torch.waiting import Waiting, meetings_of
from pyps.torch.weighting import check_weight, note_weights, rows_of, tensors_of
from pyps.worker.norms import OWN_BATCHES

_hooked: WeakSet[torch.nn.Module] = WeakSet()  # models that have a hook
_latest: WeakKeyDictionary[torch.nn.Module, ReferenceType[WeightedHook]] = WeakKeyDictionary()  # of modules
_suspended = False
SYNCHRONIZED = "for those of all samples: UnevenSyncBatchNorm.convert(model) before DistributedDataParallel"


class OwnGradients(NamedTuple):
    """A rank's mean gradients g of b samples: the sum of b, the sum of b |g|^2, and how many they are."""

    samples: float
    squares: float
    gradients: int


class WeightedHook(ABC):
    """Made by weighted_hook, which lists the parameters.

    group, device: of the ranks with samples of their own, and of the gradients. peers: the ranks with the
    same samples, such as a tensor-parallel group; None if there are none. passes: what was computed since the
    last reduction. on_ready: functions called when this rank has the last gradient of a round, before it is
    sent. waiting: the time in a step that is not this rank's own. scaler: the GradScaler in use.
    """

    passes: Passes

    def __init__(
        self,
        model: torch.nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        sampler: Rounds | None,
        count: Callable[..., Any] | None,
        reduction: str,
        scaler: Any,
    ) -> None:
        if model in _hooked:
            raise InputError("weighted_hook", "model", "one with a hook", "one without: one hook each")
        note_weights()
        self.group, self.device, self.reduction, self.scaler = group, device, reduction, scaler
        self._parameters = parameters_of(model)
        self.peers, self._compared = peers_of(self._parameters, group), False
        self.on_ready: list[Callable[[], None]] = []
        self.waiting = Waiting.on(device)
        for layer in model.modules():
            if isinstance(layer, UnevenSyncBatchNorm):
                layer.waits = self.waiting.counted
        rank, ranks = group.rank(), group.size()
        if ranks > 1 and rank == 0 and sees_own_batch_alone(model):
            warnings.warn(f"{OWN_BATCHES}; {SYNCHRONIZED}", stacklevel=4)
        self.lockstep = Lockstep(rank, ranks, sampler)
        self._sampler, self._count, self._model = sampler, count, model
        self.counts = sampler is not None  # whether each gradient is one more trained round of the sampler
        self._trained = None if sampler is None else TrainedRounds(sampler)
        self.on_ready.append(self._count_round)
        self._tables: set[tuple[int, Shape]] = set()  # see Shapes.fingerprint
        self._refusal: InputError | None = None  # of this rank's gradient, until the round is over
        self._total: torch.Tensor | None = None  # W of the latest round: float64 [], on the gradients' device
        watch()
        model.register_forward_pre_hook(Apart(self._before_forward), with_kwargs=True)
        model.register_forward_hook(Apart(self._after_forward, _refuse_copy), with_kwargs=True)
        inner = getattr(model, "module", model)
        self._on_parts = [
            part.register_forward_hook(Apart(self._after_part), with_kwargs=True)
            for part in _parts(inner)
            if part is not model and any(True for _ in part.parameters())
        ]
        if (earlier := _latest.get(inner)) is not None and (before := earlier()) is not None:
            before._leave_parts()  # this module went into another DDP
        _latest[inner] = ref(self)
        _hooked.add(model)

    def _leave_parts(self) -> None:
        """Another hook counts what the module computes from now on."""
        for handle in self._on_parts:
            handle.remove()

    @property
    def least_samples(self) -> int:
        """The fewest samples that the model trains on: two where a layer normalizes over them."""
        return 2 if any(isinstance(layer, torch.nn.BatchNorm1d) for layer in self._model.modules()) else 1

    @property
    def total(self) -> torch.Tensor | None:
        """W of the latest round, float64 []."""
        return self._total

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those of the model."""
        return iter(self._parameters)

    def meetings(self) -> int:
        """How often the ranks of the group, or all, have met."""
        return meetings_of(self.group, dist.group.WORLD)

    def set_weight(self, weight: Any) -> None:
        """Set w_i of the micro-batch whose backward() comes next, in place of the counted one.

        Raises InputError as loss_scale.
        """
        check_weight("set_weight", "weight", weight)
        self.passes.set_weight(weight)

    def accumulate(
        self, batch: Any, parts: int | Sequence[int] | None = None, *, most: int | None = None
    ) -> Iterator[Any]:
        """This rank's batch in micro-batches, for the loop that calls backward() for each.

        batch: tensors in tuples, lists and dicts, samples in the first dimension. parts: how many, or how
        many on each rank. most: in place of parts, the samples of a micro-batch that fit this rank's memory:
        as few parts as that takes; where ranks wait for each other in each part, all have as many as the one
        that needs most. Each loss is the plain mean over its micro-batch, however long that is. Raises
        InputError for fewer than one part or sample, and for unlike numbers where UnevenSyncBatchNorm waits.
        """
        if (parts is None) == (most is None):
            raise InputError("accumulate", "parts, most", f"{parts}, {most}", "one of them")
        if most is not None:
            if isinstance(most, bool) or not isinstance(most, int) or most < 1:
                raise InputError("accumulate", "most", repr(most), "a whole number from 1")
            parts = self._agreed_parts(max(1, -(-rows_of(batch) // most)))
        assert parts is not None
        if not isinstance(parts, int):
            self._check_alike("accumulate", parts)
        return self._accumulate(batch, parts)

    def _agreed_parts(self, own: int) -> int:
        """How many parts this rank's batch has, of which it needs `own`."""
        return self._largest(own) if self._waits_in_parts() else own

    def _largest(self, own: int) -> int:
        """Of all ranks."""
        found = torch.tensor(own, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def _waits_in_parts(self) -> bool:
        """Whether ranks wait for each other in each pass of a round."""
        return any(isinstance(m, UnevenSyncBatchNorm) for m in self._model.modules())

    def rounds(self, loader: Any) -> Iterator[Iterator[Any]]:
        """Each round's micro-batches, of a loader whose sampler accumulates; as in accumulate().

        Raises InputError without a sampler, and for a round whose micro-batches were not all taken.
        """
        if self._sampler is None:
            raise InputError("rounds", "sampler", "None", "weighted_hook(model, sampler)")
        parts = self._sampler.accumulations
        self._check_alike("rounds", parts)
        return self._rounds(loader, parts)

    def _check_alike(self, where: str, parts: Sequence[int]) -> None:
        """Raise InputError where ranks would wait for a pass that does not come."""
        if len(set(parts)) > 1 and self._waits_in_parts():
            expected = "as many on every rank: UnevenSyncBatchNorm waits for all ranks in each"
            raise InputError(where, "micro-batches", f"{tuple(parts)}", expected)

    @abstractmethod
    def watch_gradients(self) -> None:
        """From now on keep what own_gradients() gives."""

    @abstractmethod
    def own_gradients(self) -> OwnGradients:
        """Those of this rank since the last call, before they were reduced."""

    def square_norm(self) -> float:
        """Of the reduced gradient, over all of the model's parts; all ranks call this."""
        ranks = dist.get_world_size(self.group) * (dist.get_world_size(self.peers) if self.peers else 1)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self._parameters:
            if parameter.grad is not None:
                own: Any = getattr(parameter.grad, "_local_tensor", parameter.grad)
                total += own.double().square().sum() / all_copies(parameter, ranks)
        dist.all_reduce(total, group=self.group)
        if self.peers is not None:
            dist.all_reduce(total, group=self.peers)
        return float(total)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the next round needs of the earlier ones, on this rank."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that."""

    @abstractmethod
    def _accumulate(self, batch: Any, parts: int | Sequence[int]) -> Iterator[Any]:
        """The passes of a round; as accumulate()."""

    @abstractmethod
    def _rounds(self, loader: Any, parts: Sequence[int]) -> Iterator[Iterator[Any]]:
        """The passes of each round; parts: micro-batches by rank."""

    @abstractmethod
    def _begin(self, weight: Any) -> None:
        """A forward pass begins. weight: its samples, or a function that counts them."""

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if _suspended or not torch.is_grad_enabled():
            return
        if self.waiting.is_timed:
            self.waiting.forward()
        self._compare_ranks()

        def weight() -> Any:
            if self._count is None:
                return rows_of((args, kwargs))
            counted = self._count(*args, **kwargs)
            check_weight("weighted_hook", "count", counted)
            return counted

        if not module.training:  # mostly no backward() comes
            self._begin(weight)
            return
        own = weight()
        if self.peers is not None and not self._compared:
            self._compare(float(own))
        self._begin(own)

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._end_uncompiled(args, kwargs, output)
        else:
            self._end(args, kwargs, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_uncompiled(self, args: Any, kwargs: Any, output: Any) -> None:
        self._end(args, kwargs, output)

    def _end(self, args: Any, kwargs: Any, output: Any) -> None:
        if not _suspended and torch.is_grad_enabled():
            self.passes.end(output, None if self._count else (args, kwargs))

    def _after_part(self, part: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A part of the model has computed, mostly within the model's forward(), which counts it."""
        if self.passes.within or torch.compiler.is_compiling():
            return
        if not _suspended and torch.is_grad_enabled():
            inputs = None if self._count else (args, kwargs)
            rows = None if inputs is None else next(map(len, tensors_of(inputs)), None)
            self.passes.apart(output, rows, not part.training, inputs)

    def _fingerprint(self, shapes: Iterable[Shapes]) -> int | None:
        """That of a round, of whose passes these are the shapes; None if it has none."""
        knows_rows = hasattr(self.lockstep.sampler, "sizes")  # _check_first() has compared them
        means = self.reduction == "mean"
        found = {one.fingerprint(knows_rows, self._tables, means) for one in shapes} - {None}
        # Passes of a loss are one more dimension: no chunk of a batch has all of its samples.
        passes = 0 if knows_rows else self.passes.met - 1
        return (sum(found) + passes) & BITS if found else None  # type: ignore[arg-type]

    def _ready(self) -> None:
        """This rank has the last gradient of a round."""
        for observe in self.on_ready:
            observe()
        self.waiting.ready()

    def _count_round(self) -> None:
        if self.counts and self._trained is not None and not self.passes.again:
            self._trained.count(self.passes.backwards, self.step_samples)

    @property
    def step_samples(self) -> int | None:
        """This rank's samples since the reduction before, if they were counted as such."""
        return None if self._count is not None else self.passes.samples

    def _compare(self, weight: float) -> None:
        """Raise InputError if the peers' first batches differ, before they wait for each other."""
        self._compared = True
        weights: list[Any] = [None] * dist.get_world_size(self.peers)
        dist.all_gather_object(weights, weight, group=self.peers)
        if len(set(weights)) > 1:
            listed = ", ".join(f"{one:.0f}" for one in weights)
            expected = "the same batch on all ranks of a tensor-parallel group"
            raise InputError("weighted_hook", "samples of the first batch", f"{listed} on peers", expected)

    def _check_first(self, own: Any, total: float) -> None:
        """Raise InputError if the samples of the first round are not the sampler's, or so many times these.

        own: this rank's. A library's loader gives its sampler, too.
        """
        found, expected = self._unlike_first(own, total)
        refused = torch.tensor(float(found is not None), device=self.device)
        dist.all_reduce(refused, group=self.group)  # all raise, or the others would wait for the gradients
        if float(refused):
            self._compare_ranks(now=True)  # what a rank has refused is left out of the samples
            found = found or "those of other ranks, which are not the sampler's"
            raise InputError("weighted_hook", "samples of the first round", found, expected)

    def _compare_ranks(self, now: bool = False) -> None:
        """As Lockstep's; on a rank that has refused its gradients, raise that."""
        try:
            self.lockstep.compare(now)
        except InputError as other:
            raise self._refused() or other from None

    def _check_late(self) -> None:
        """Raise what a rank has refused after it had sent W: on all ranks."""
        own = self.passes.refused()
        rank = self.passes.largest(-1 if own is None else self.group.rank())
        if own is None and rank >= 0:
            own = refused_by([rank])
        if own is not None:
            raise own

    def _refused(self) -> InputError | None:
        """What this rank has refused of the round, once."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def _unlike_first(self, own: Any, total: float) -> tuple[str | None, str]:
        """What this rank refuses of the first round, None for nothing; and what it expects."""
        sampler: Any = self.lockstep.sampler
        expected = "the samples of the sampler's rounds; if they are not the first dimension, pass count="
        counted = self._count is None and self.reduction == "mean" and not self.passes.is_said
        if not counted or not hasattr(sampler, "sizes"):
            return None, expected
        known, times = set(sampler.sizes()), {total / size for size in sampler.sizes()}
        drawn = [sampler.round_samples(number) for number in range(sampler.drawn)]
        if drawn:  # all that is computed in a round of its samples is as many times these on each rank
            times = {total / size for size, part in drawn if own * size == total * part}
        if any(one == int(one) > 0 for one in times):
            return None, expected
        found = f"{float(own):.0f} of {total:.0f}, by the first tensor that forward() got"
        return found, f"one of {sorted(known)[-3:]}; if samples are not its first dimension, pass count="


def is_weighted(model: torch.nn.Module) -> bool:
    """Whether a model has its hook."""
    return model in _hooked


def suspended() -> bool:
    """Whether no pass counts: within unweighted()."""
    return _suspended


def _ignore(*_: Any) -> None:
    pass


class Apart:
    """A hook that copies and pickles of its module leave behind. copied: what they have in its place."""

    def __init__(self, function: Callable[..., Any], copied: Callable[..., Any] = _ignore) -> None:
        self._function, self._copied = function, copied

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __reduce__(self) -> Any:
        return Apart, (self._copied, self._copied)


def _refuse_copy(model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """A copy of a model has no weights: it may compute, as an average of parameters, and not be trained."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        for tensor in attached(output, DEPTH):
            assert tensor.grad_fn is not None
            tensor.grad_fn.register_prehook(_raise_of_copy)


def _raise_of_copy(_: Any) -> None:
    expected = "DistributedDataParallel(copy.deepcopy(model.module)), and its own hook"
    raise InputError("weighted_hook", "backward()", "a copy of the model, without its hook", expected)


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """What a script may call in place of the model: its module, and the parts of that and of containers."""
    yield module
    for child in module.children():
        if isinstance(child, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _parts(child)
        else:
            yield child


@contextmanager
def unweighted() -> Iterator[None]:
    """Within it, no forward pass counts: the gradients of models without DDP get no weights."""
    global _suspended
    _suspended = True
    try:
        yield
    finally:
        _suspended = False
