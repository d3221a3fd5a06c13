"""GlobalMean: the gradient of uneven batches is that of one process with all samples.

    mean = GlobalMean(model, sampler)
    ...
    mean.backward(loss)                 # was loss.backward()
    mean.backward(loss, n=count)        # where the graph cannot say what the loss is a mean over

The loss's own graph has kept what each of its means was divided by (pyps.worker.step.terms). One row of each
rank says so to the others (pyps.agreement.rows). Then each term's gradient enters times N n / W: n is what
this rank divided by, W the sum of that over N ranks. DDP and FSDP2 average over N, so the result is the
gradient of the same loss on all samples, each term a mean over its own items. No communication hook and no
forward hook takes part.

Micro-batches under no_sync() count as one batch: their gradients enter times n, and are divided by W once all
are reduced.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from pyps.agreement.consensus import DEADLINE_SECONDS
from pyps.agreement.rows import StepAgreement
from pyps.errors import InputError
from pyps.torch.accumulate import MicroBatches
from pyps.torch.factors import (
    MICRO,
    Counts,
    alike,
    alone_of,
    as_tensor,
    bare,
    inverse,
    is_on_device,
    is_sum,
    number_of,
    on_host,
    power_of_two,
    root_of,
    shares_of,
    times,
    unlike_micro_batches,
)
from pyps.torch.norm import note_trained, sees_own_batch_alone
from pyps.torch.rounds import Rounds, note_weights
from pyps.torch.unreduced import Unreduced, term_factors, whole_factor
from pyps.torch.waiting import Waiting
from pyps.torch.wire import Wire
from pyps.torch.wrapped import OPEN, REDUCED, Wrapped
from pyps.torch.wrapped_models import wrapped_models
from pyps.worker.step.terms import (
    OVER_ALL,
    OWN_BATCHES,
    Number,
    Term,
    are_of_samples,
    quotients_of,
    terms_of,
)

BackwardCall = Callable[[], Any]  # a backward pass
_means: WeakSet[GlobalMean] = WeakSet()


def mean_of(model: torch.nn.Module) -> GlobalMean | None:
    """The GlobalMean of a model, if it has one."""
    plain = getattr(model, "_orig_mod", model)
    return next((one for one in _means if any(wrapped.model is plain for wrapped in one.models)), None)


@contextmanager
def unweighted() -> Iterator[None]:
    """Within it, plain loss.backward() is allowed: for this rank's own gradient, or a hand-made weight."""
    OPEN.append(unweighted)
    try:
        yield
    finally:
        OPEN.pop()


class GlobalMean(MicroBatches):
    """Backward passes whose gradients are those of the loss over all ranks' samples.

    model: a DistributedDataParallel, what fully_shard gives, or several that one loss goes through; compiled
    or not. All ranks make a GlobalMean together.
    sampler: an UnevenBatchSampler or UnevenIterableDataset; its epoch, position and split are compared at
    each step, and end_step() moves its position.
    reduction: "mean", or "sum" where the loss is a sum over samples and divided by constants alone.
    wire: the type in which DDP's gradients are sent: "same", "bf16", "f16", or "int8" and "int4" with error
    feedback. scaler: the torch.amp.GradScaler in use.
    timeout: seconds that backward() waits for the other ranks.
    `group` has the ranks with samples of their own, `peers` those that share this rank's samples, if any.
    Raises InputError on all ranks for another model, options that are unknown, and parameters that train and
    that nothing reduces.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        sampler: Rounds | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        wire: Wire = "same",
        scaler: Any = None,
        timeout: float = DEADLINE_SECONDS,
    ) -> None:
        self.models: list[Wrapped] = wrapped_models(model)
        first = self.models[0]
        self.group, self.peers, self.device = first.group, first.peers, first.device
        self.reduction, self.sampler, self.scaler, self.wire = reduction, sampler, scaler, wire
        self._agreement = self._made_agreement(timeout)
        self.ranks = dist.get_world_size(self.group)
        self.waiting = Waiting.on(self.device)
        self.asks = self.asked = False  # a decision about the split: this rank, any rank
        self.share: Number | None = None  # this rank's of the latest pass's items; None: of sums
        self.late: Number = 1.0  # what gradients were multiplied with after their reduction
        self.calls = 0
        self.passes = 1  # micro-batches of the latest of them on this rank
        self._versions = f"pyps {metadata.version('pyps-train')}, torch {torch.__version__}"
        self._held: Unreduced | None = None
        self.compared: list[Callable[[], dict[str, Any]]] = []  # more fields that all ranks have alike
        self._unit: Any = 1.0  # what counts of micro-batches are divided by, so that 16 bits do not overflow
        self._own_counts: set[tuple[str, int]] = set()  # sums whose divisor was found to be a count
        self._losses: Callable[[], torch.Tensor | None] = lambda: None
        self._late: list[tuple[Any, torch.Tensor, str]] = []
        self._is_walked = False
        self._wire = first.install_wire(wire, scaler) if wire != "same" else None
        for one in self.models:
            one.watch()
        if self.peers is not None:
            self._compare_batches(StepAgreement("GlobalMean", self.peers, None, timeout))
        _means.add(self)
        note_weights()
        alone = any(sees_own_batch_alone(one.model) for one in self.models)
        if self.ranks > 1 and self._agreement.rank == 0 and alone:
            expected = "UnevenSyncBatchNorm.convert(model) before its first step for those of all samples"
            warnings.warn(f"{OWN_BATCHES}; {expected}", stacklevel=2)

    def _made_agreement(self, timeout: float) -> StepAgreement:
        return StepAgreement("GlobalMean", self.group, self.peers, timeout, self._refused_options())

    def _compare_batches(self, agreement: StepAgreement) -> None:
        """Let peers compare their batches as a pass begins: collectives of unlike shapes would end them."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def enters(_: torch.nn.Module, *given: Any) -> None:
            if torch.is_grad_enabled():
                shapes = [tuple(one.shape) for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
                with self.waiting.counted():
                    agreement.exchange({"batch of ranks that share it": shapes}, [])

        for one in self.models:
            one.model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True)

    def _refused_options(self) -> InputError | None:
        """Return what this rank refuses of its options."""
        if self.wire not in get_args(Wire):
            return InputError("GlobalMean", "wire", repr(self.wire), "same, bf16, f16, int8 or int4")
        if self.reduction not in ("mean", "sum"):
            return InputError("GlobalMean", "reduction", repr(self.reduction), "mean or sum")
        if self.sampler is not None and not isinstance(self.sampler, Rounds):
            expected = "an UnevenBatchSampler or UnevenIterableDataset"
            return InputError("GlobalMean", "sampler", type(self.sampler).__name__, expected)
        if self.wire != "same" and (len(self.models) > 1 or not self.models[0].is_ddp):
            expected = "same; of fully_shard, MixedPrecisionPolicy(reduce_dtype=...) says what is sent"
            return InputError("GlobalMean", "wire", repr(self.wire), expected)
        if any(one.group != self.models[0].group for one in self.models):
            return InputError("GlobalMean", "model", "models of different process groups", "one group")
        return next((found for one in self.models if (found := one.refused())), None)

    def backward(self, loss: torch.Tensor, n: Any = None, **options: Any) -> None:
        """Add the gradient of the loss over all ranks' samples to the parameters' .grad.

        loss: this rank's, of one value. n: how many items it is a mean over (a number, or a tensor of one
        value on any device), where its graph cannot say: a compiled loss, or a model's own. options: as in
        torch.Tensor.backward. All ranks call it equally often; a pass under no_sync() waits for no other one.
        Raises InputError on all ranks before any gradient is reduced, for what it does not know, and for what
        differs between ranks.
        """
        self.run(loss, lambda: loss.backward(**options), n)  # type: ignore[no-untyped-call]

    def run(self, loss: torch.Tensor, call: BackwardCall, n: Any = None, *, is_part: bool = False) -> None:
        """Weigh the backward pass that `call` makes of the loss, as backward() does: for a library's own.

        is_part: the ranks' losses are parts of one, divided by all of their items already, that is their sum.
        """
        self.waiting.computes()
        if self._held is not None and self._is_zeroed(self._held):
            self._held = None
        terms: list[Term] = []
        error = self._found_late()
        try:
            terms = self._terms(loss, n, is_part)
        except InputError as refused:
            error = error or refused
        if not self.reduces:
            self._hold(loss, terms, error, call)
            return
        self.calls += 1
        self.passes = 1 if self._held is None else self._held.batches + 1
        self._begin(loss, terms, error, call)

    def _is_zeroed(self, held: Unreduced) -> bool:
        """Tell whether the script has dropped the gradients of micro-batches, and so the micro-batches."""
        if held.error is not None or not all(one.is_ddp for one in self.models):
            return False
        if held.first is None or held.first.grad is None:
            return all(p.grad is None for p in self.parameters())
        return held.first.grad._version != held.version and not bool(held.first.grad.any())

    @property
    def reduces(self) -> bool:
        """Tell whether the next backward pass reduces gradients; else it is a micro-batch under no_sync()."""
        return all(one.reduces() for one in self.models)

    @property
    def held(self) -> int:
        """Micro-batches whose gradients are not reduced yet."""
        return 0 if self._held is None else self._held.batches

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the latest step over all ranks' samples, float64 [], on the losses' device.

        It is computed when it is read. None, with a warning that says why, where the terms of the loss are
        means over unlike shares of the samples: the graph keeps their divisors, not their values.
        """
        return self._losses()

    def end_step(self, rounds: int | None = None) -> None:
        """End a step: the sampler's position moves on by the rounds that were trained.

        rounds: how many, where the loop's loader draws ahead of what is trained. UnevenStep,
        Rebalancer.step() and the adapters call it; a loop without these calls it after optimizer.step().
        Raises InputError for micro-batches that were not reduced.
        """
        if self._held is not None:
            expected = "a last one outside of no_sync(), which reduces the gradients of all"
            raise InputError("GlobalMean", MICRO, f"{self._held.batches} that were not reduced", expected)
        if self.sampler is not None:
            self.sampler.end_step(rounds, self.passes)
        self.calls = 0

    def meeting_groups(self) -> list[Any]:
        """The groups in which the script may let ranks wait for each other; None stands for no group."""
        return [self.group, self.peers, dist.group.WORLD]

    def meet(self, call: str) -> None:
        """Wait until all ranks make this call. Raises InputError on all where one makes another one."""
        self._agreement.exchange({"call": call}, [])

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters of the models."""
        return (parameter for one in self.models for parameter in one.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step needs of the earlier ones on this rank: the wire's residuals."""
        return {} if self._wire is None else {"wire": self._wire.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that. Raises InputError for the state of another wire."""
        if ("wire" in state) != (self._wire is not None):
            found = "residuals" if "wire" in state else "none"
            raise InputError("GlobalMean state", "wire", found, f"those of wire={self.wire!r}")
        if self._wire is not None:
            self._wire.load_state_dict(state["wire"])

    # What a loss is made of

    def _terms(self, loss: torch.Tensor, n: Any, is_part: bool) -> list[Term]:
        """The terms of this rank's loss. Raises InputError for what this rank refuses."""
        for one in self.models:
            one.check_trained()
        if is_part:
            return [Term(root_of(loss), "part", False, None, quotients=quotients_of(loss))]
        if n is None:
            terms = terms_of(loss)
        else:
            terms = [Term(root_of(loss), "n", True, number_of(n), quotients=quotients_of(loss))]
        if not self._is_walked:
            self._check_leaves(loss)
        if self.reduction == "sum":
            terms = [term if term.is_mean else bare(term) for term in terms]
        elif any(term.count is None for term in terms):
            name = next(term.kind for term in terms if term.count is None)
            expected = "a mean; reduction='sum' for a sum over samples, or backward(loss, n=count)"
            raise InputError("backward", "loss", f"a sum that is divided by nothing ({name})", expected)
        self._check_samples(terms)
        for term in terms:
            if term.count is not None and not term.is_mean:  # it may be subtracted
                term.constant = math.prod(math.copysign(1.0, divisor) for divisor in term.divisors)
                term.count = term.count.abs() if isinstance(term.count, torch.Tensor) else abs(term.count)
                if term.count == 1.0 and self.ranks > 1 and not is_on_device(term):
                    term.count = term.unclamped()
            if self._empty and term.count is not None:
                term.count = torch.zeros_like(term.count) if isinstance(term.count, torch.Tensor) else 0.0
        return terms

    def _check_samples(self, terms: list[Term]) -> None:
        """Raise InputError where the samples were added up before anything was divided by their number."""
        if len(terms) == 1 and terms[0].kind not in OVER_ALL:
            return
        samples = self._samples_of_pass()
        if are_of_samples(terms, samples):
            found = f"a loss of each of {len(terms)} samples, each a mean over a number of items of its own"
            expected = "how many samples this rank's loss is a mean over: backward(loss, n=count)"
            raise InputError("backward", "loss", found, expected)
        for term in terms:
            if term.kind in OVER_ALL and term.adds_up(samples):
                found = f"a {term.kind} over what was reduced over the {samples} samples before"
                raise InputError("backward", "loss", found, "one mean over all, or backward(loss, n=count)")

    def _samples_of_pass(self) -> int | None:
        """This rank's samples of a pass that is the whole of its batch; else None."""
        return self.samples_now() if self._held is None and self.reduces else None

    def _check_leaves(self, loss: torch.Tensor) -> None:
        """Raise InputError for a parameter that the loss trains and that no model reduces; once."""
        self._is_walked = True
        for one in self.models:
            note_trained(one.model)
        reduced = {id(p) for one in self.models for p in one.reduced()}
        stack, seen = [loss.grad_fn], set[Any]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if (
                isinstance(leaf, torch.nn.Parameter)
                and self.models[0].is_ddp
                and id(leaf) not in reduced
                and leaf.requires_grad
                and not hasattr(leaf, REDUCED)  # by another GlobalMean
            ):
                found = f"a parameter of shape {list(leaf.shape)} that is in none of the models"
                raise InputError("GlobalMean", "model", found, "all models that train, in one list")
            stack += [below for below, _ in node.next_functions]

    def _fields(self, loss: torch.Tensor, terms: list[Term]) -> dict[str, Any]:
        """Return what all ranks of a step have alike."""
        position = {} if self.sampler is None else self.sampler.position_now()
        return {
            "call": "backward()",
            **position,
            "backward() calls in this step": self.calls,
            "wire": self.wire,
            "reduction": self.reduction,
            "GradScaler": self.scaler is not None and bool(self.scaler.is_enabled()),
            "versions": self._versions,
            "trained parameters": tuple(one.trained() for one in self.models),
            "type of the loss": str(loss.dtype),
            "terms of the loss": [(t.kind, t.is_mean, t.count is None, is_on_device(t)) for t in terms],
            **{name: value for more in self.compared for name, value in more().items()},
        }

    # A pass that reduces

    def _begin(
        self, loss: torch.Tensor, terms: list[Term], error: InputError | None, call: BackwardCall
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            error = error or held.error or held.add(loss, terms, self._empty)
        error = error or self._refused_losses() or self._refused_number(loss, terms)
        counts: list[Number | None] = [term.count for term in terms]
        if held is not None and error is None:
            counts = list(held.counts)
        own = torch.zeros_like(loss) if self._empty else loss.detach()
        value = own if held is None or error else held.whole_loss()
        filled = held.filled if held is not None else int(not self._empty)
        on_device = loss.device.type != "cpu" or any(is_on_device(term) for term in terms)
        host = [float(self.passes), float(filled), math.nan if on_device else float(value), float(self.asks)]
        for term, count in zip(terms, counts, strict=True):
            host += [on_host(count), term.constant]
        fields = self._fields(loss, terms)
        with self.waiting.counted():
            rows = self._agreement.exchange(fields, host, error)
        passes, filled_of, host_losses, asks, *numbers = zip(*rows, strict=True)
        self.asked = any(asks)
        losses: Counts = list(host_losses)
        weights: list[Counts] = [list(counts) for counts in numbers[::2]]
        if on_device:
            with self.waiting.counted():
                losses, there = self._on_device(value, terms, counts)
            for k, count in enumerate(counts):
                weights[k] = there[:, k] if isinstance(count, torch.Tensor) else weights[k]
        self._check_terms(terms, filled_of, numbers, fields)
        shares = [shares_of(counts) for counts in weights]
        is_mean = bool(terms) and terms[0].count is not None
        self.share, self.late = shares[0][self._agreement.rank] if is_mean else None, 1.0
        if max(passes) > 1:
            self._reduce_held(loss, terms, weights or [list(filled_of)], losses, held, call)
        else:
            self._losses = self._over_all(losses, shares, terms)
            factors = [len(rows) * share[self._agreement.rank] for share in shares]
            inverses = [len(rows) * inverse(counts) for counts in weights]
            alone = [alone_of(term, one) for term, one in zip(terms, inverses, strict=True)]
            self._run(loss, list(zip(terms, factors, alone, strict=True)), 1.0, call)

    def _refused_losses(self) -> InputError | None:
        """Refuse several losses of each micro-batch: the last one's first would reduce without its others."""
        if self.passes <= self.micro_batches or not self.micro_batches:
            return None
        found = f"{self.passes} or more backward() calls in {self.micro_batches}"
        return InputError(
            "backward", "micro-batches of accumulate()", found, "one for each, of the losses' sum"
        )

    def _refused_number(self, loss: torch.Tensor, terms: list[Term]) -> InputError | None:
        """Refuse a loss of several micro-batches that is divided by their number, unless an adapter has
        multiplied it again, as a library has divided it.
        """
        if self.passes == 1 or not terms or not all(term.divided_by(self.passes) for term in terms):
            return None
        root = loss.grad_fn
        again = getattr(root, "_saved_other", None) if type(root).__name__ == "MulBackward0" else None
        if isinstance(again, torch.Tensor) and again.numel() == 1 and float(again) == self.passes:
            return None
        found = f"a loss divided by the number of {MICRO}, {self.passes}"
        own = f"a number of the loss itself is `loss * {1 / self.passes:g}`"
        expected = f"the plain mean of each: GlobalMean takes that over all of them ({own})"
        return InputError("backward", "loss", found, expected)

    def _on_device(
        self, value: Any, terms: list[Term], counts: list[Number | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [ranks] and counts [ranks, terms] of all ranks, on the device; the host does not wait."""
        numbers = [value, *counts, *(term.divisor for term in terms)]
        own = torch.stack([self._as_number(1.0 if one is None else one) for one in numbers])
        rows, many = self.gathered(own), len(terms)
        if any(term.divisor is not None for term in terms):
            constants = rows[:, 1 + many :]
            self._read_later(
                (constants != constants[0]).any(), "a loss times a number that is another on each rank"
            )
        sums = [k for k, t in enumerate(terms) if not t.is_mean and isinstance(t.count, torch.Tensor)]
        if sums and self.ranks > 1 and ("device", 0) not in self._own_counts:
            found = rows[:, 1:][:, sums]
            self._own_counts.add(("device", 0))
            self._read_later(
                (found == found[0]).all(0).any(),
                "a sum divided by the same number on all ranks, which may be a constant",
            )
        return rows[:, 0], rows[:, 1 : 1 + many]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, on the device."""
        rows = own.new_empty(self.ranks, len(own))
        dist.all_gather(list(rows.unbind()), own, group=self.group)
        return rows

    def _as_number(self, number: Any) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            return number.detach().to(self.device, torch.float64).reshape(())
        return torch.full((), float(number), dtype=torch.float64, device=self.device)

    def _read_later(self, flag: torch.Tensor, what: str) -> None:
        """Raise it with a later step if the flag is set, without a wait for the device."""
        if flag.device.type != "cuda":
            if bool(flag):
                self._late.append((None, flag, what))
            return
        copied = torch.empty((), dtype=torch.bool, pin_memory=True)
        copied.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._late.append((event, copied, what))

    def _found_late(self) -> InputError | None:
        """Return what a device has found in an earlier step."""
        while self._late and (self._late[0][0] is None or self._late[0][0].query()):
            _, flag, what = self._late.pop(0)
            if bool(flag):
                expected = "counts of this rank's own items and equal constants, or backward(loss, n=count)"
                return InputError("backward", "loss, in an earlier step", what, expected)
        return None

    def _check_terms(
        self,
        terms: list[Term],
        filled: Sequence[float],
        numbers: Sequence[Sequence[float]],
        fields: dict[str, Any],
    ) -> None:
        """Raise InputError, on all ranks, for constants that differ and for sums whose divisor may be one.

        filled: passes with samples of their own, by rank. numbers: of each term the counts by rank, then the
        constants.
        """
        unsure = []
        for k, term in enumerate(terms):
            counts, constants = numbers[2 * k : 2 * k + 2]
            if any(constant != constants[0] for constant in constants):
                listed = ", ".join(f"{c:g} on rank {rank}" for rank, c in enumerate(constants))
                expected = "the same number on all ranks (of a loss scale too), or backward(loss, n=count)"
                raise InputError("backward", "loss", f"a {term.kind} times {listed}", expected)
            if any(count < 0 or math.isinf(count) for count in counts):
                listed = ", ".join(f"{c:g} on rank {rank}" for rank, c in enumerate(counts))
                raise InputError("backward", "loss", f"a {term.kind} over {listed}", "0 items or more")
            key = (str(fields["terms of the loss"]), k)
            if term.is_mean or term.count is None or not any(counts):  # by all ranks', so that all answer
                continue
            if len(counts) == 1 or key in self._own_counts:
                continue
            of_a_pass = {count / passes for count, passes in zip(counts, filled, strict=True) if passes}
            if len(of_a_pass) == 1 and sum(filled) > 1:
                unsure.append((of_a_pass.pop(), term, key))
            else:
                self._own_counts.add(key)
        if not unsure:
            return
        samples = self._samples_of_pass() if self.passes == 1 else None
        own = [float(term.counts_own(samples)) for _, term, _ in unsure]
        answers = self._agreement.exchange({"doubtful sums": len(unsure)}, own)
        for (number, term, key), answer in zip(unsure, zip(*answers, strict=True), strict=True):
            if not any(answer):
                found = f"a sum ({term.kind}) divided by {number:g} on all ranks"
                expected = (
                    "a count of this rank's items: backward(loss, n=count); reduction='sum' for a constant"
                )
                raise InputError("backward", "loss", found, expected)
            self._own_counts.add(key)

    def _over_all(
        self, host_losses: Counts, shares: list[Counts], terms: list[Term]
    ) -> Callable[[], torch.Tensor | None]:
        """Return what computes the loss of all samples, when it is read."""
        scale, sums = self._scale_of_losses(), [is_sum(term) > 0 for term in terms]

        def over_all() -> torch.Tensor | None:
            losses = as_tensor(host_losses)
            equal: Counts = [1 / len(losses)] * len(losses)
            share = as_tensor(shares[0] if shares else equal).to(losses.device)
            unlike = [other for other in shares[1:] if not alike(other, share)]
            empty = share == 0
            lost = torch.isinf(losses) if len(terms) == 1 else torch.ones_like(empty)
            if unlike or (any(sums) and bool((empty & lost).any())):
                why = "a term is divided by 0" if not unlike else "terms are means over unlike shares"
                warnings.warn(f"GlobalMean.loss is None: {why}, and a graph keeps no values", stacklevel=3)
                return None
            found: torch.Tensor = torch.where(share > 0, share * losses, 0.0).sum() / scale
            return found

        return over_all

    def _scale_of_losses(self) -> Any:
        """Return what a GradScaler has multiplied the losses by."""
        scale = None if self.scaler is None else getattr(self.scaler, "_scale", None)
        return 1.0 if scale is None else scale.detach().double().clone()

    def _run(
        self,
        loss: torch.Tensor,
        factors: list[tuple[Term, Number, Number]],
        whole: Number,
        call: BackwardCall,
    ) -> None:
        """One backward pass in which each term's gradient, and that of the whole loss, enters times a factor.

        factors: with each, what is in place of the gradient where the factor is 0.
        """
        entered: list[torch.Tensor] = []
        handles = [
            root_of(loss).register_prehook(lambda gradients: entered.append(gradients[0])),
            root_of(loss).register_prehook(times(whole, 0.0, entered)),
        ]
        for term, factor, alone in factors:
            own = (0.0, 0.0) if self._empty else (factor, alone)
            handles.append(term.node.register_prehook(times(*own, entered)))
        if self._wire is not None:
            self._wire.late = self.late
        OPEN.append(loss)
        try:
            with self.waiting.backward(root_of(loss)):
                call()
        finally:
            OPEN.pop()
            for handle in handles:
                handle.remove()
        if self.reduces:
            for one in self.models:
                one.check_reduced()

    # Micro-batches

    def _hold(
        self, loss: torch.Tensor, terms: list[Term], error: InputError | None, call: BackwardCall
    ) -> None:
        """Run a pass under no_sync(): its gradient enters times its count. An error waits for the pass that
        reduces, where all ranks raise it.
        """
        if self._held is None:
            self._held = Unreduced(before=self._set_aside())
        held = self._held
        held.error = held.error or error or held.add(loss, terms, self._empty)
        held.batches += 1
        if held.error is None:
            self._run(
                loss, term_factors(terms, self._unit), whole_factor(terms, self._empty, self._unit, 0.0), call
            )
        elif loss.grad_fn is not None and self._meets_in_passes():  # the others wait for this rank in it
            self._run(loss, [], 0.0, call)
        held.note_gradient(self.parameters())

    def give_up(self) -> None:
        """Forget micro-batches that are not reduced, as their loop was left: gradients are as before it."""
        held, self._held = self._held, None
        if held is not None:
            for one in self.models:
                one.forget()
            for p, before in held.before:
                p.grad = before

    def _set_aside(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Take gradients of earlier reductions away, which are not to be divided again."""
        found = [(p, p.grad.detach().clone()) for p in self.parameters() if p.grad is not None]
        for p, _ in found:
            p.grad = None
        return found

    def _reduce_held(
        self,
        loss: torch.Tensor,
        terms: list[Term],
        weights: list[Counts],
        losses: Counts,
        held: Unreduced | None,
        call: BackwardCall,
    ) -> None:
        """The last pass of a step that has several micro-batches on some rank."""
        ranks, unit = len(losses), self._unit
        is_bare = bool(terms) and terms[0].count is None
        shares = [shares_of(counts) for counts in weights]
        if any(not alike(other, shares[0]) for other in shares[1:]):
            raise unlike_micro_batches()
        self._losses = self._over_all(losses, shares, terms)
        set_aside = held.before if held is not None else self._set_aside()
        each: Any = inverse([1.0] if is_bare else weights[0])
        is_none = (each == 0) * 1.0  # no rank has an item: what is no term, as a penalty, still enters once
        whole = whole_factor(terms, self._empty, unit, 1 / ranks) + is_none
        self.late = factor = ranks * unit * each + is_none
        self._run(loss, term_factors(terms, unit), whole, call)
        gradients: list[Any] = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_([getattr(g, "_local_tensor", g) for g in gradients], factor)
        for p, before in set_aside:
            p.grad = before if p.grad is None else p.grad.add_(before)
        self._unit = 1.0 if is_bare else power_of_two(as_tensor(weights[0]).sum() / ranks)
