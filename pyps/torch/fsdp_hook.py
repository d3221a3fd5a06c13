"""FSDPHook: the gradient of uneven batches, exactly, in FSDP2's own reduction; also HSDP.

FSDP2 averages: 1/N for each rank, whatever its batch. The hook multiplies each group's gradients by N w_i / W
just before they are reduced, so the average is sum_i (w_i / W) g_i, the gradient of the mean over all
samples, whatever they flowed through. W is summed over the ranks before the first group's reduction.

In a round whose passes each reduce (accumulate and rounds with one number for all) W is not known at first.
Such passes take N w / A with the W of the round before for A, the same on all ranks; after the last one, the
shards are multiplied by A / W, unless that is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pyps.errors import InputError
from pyps.torch.accumulate import check_round, cuts_of, rows_between
from pyps.torch.fsdp_shards import ShardedModules
from pyps.torch.gathered import is_gathered
from pyps.torch.lockstep import REFUSED
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.passes import Passes
from pyps.torch.peers import own_copies
from pyps.torch.rounds import Rounds
from pyps.torch.shapes import Shapes
from pyps.torch.weighted import OwnGradients, WeightedHook, suspended
from pyps.torch.weighting import as_float64, not_zero, rows_of, scale_in_place


class _Round:
    """A round of several passes. weights: of those that were reduced. assumed: A.

    whole: whether only the last pass reduces. last: whether the pass that comes next is that. is_empty:
    whether that has no samples of its own. unit: of what the last pass has reduced, once that is known.
    is_reduced: whether it has.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.weights: list[Any] = []
        self.ways = set[str]()  # as Passes'
        self.shapes: list[Shapes] = []
        self.unit: Any = None
        self.last = self.is_empty = self.is_reduced = False
        self.assumed: torch.Tensor | None = None


class _Reduced:
    """What is reduced at once, of a pass or of a round.

    weight: its samples. unit: the gradient times this is the sum over them. square: of this rank's gradient
    of the parameters that were seen.
    """

    def __init__(self, weight: Any, unit: Any) -> None:
        self.weight, self.unit = weight, unit
        self.square: Any = 0.0
        self.seen: set[int] = set()


class FSDPHook(WeightedHook):
    """The weights of a model that went through fully_shard.

    A rank's micro-batches of unlike number keep the parameters gathered for the round: give accumulate() a
    list with one number for each rank. With one number for all, parameters are gathered for each micro-batch,
    its gradients are reduced at once, and no rank holds more than without micro-batches.
    """

    def __init__(
        self,
        model: FSDPModule,
        sampler: Rounds | None,
        count: Callable[..., Any] | None,
        reduction: str,
        scaler: Any = None,
    ) -> None:
        assert isinstance(model, torch.nn.Module)
        self._shards = ShardedModules(model)
        group, device = self._shards.process_group(), self._shards.device
        super().__init__(model, group, device, sampler, count, reduction, scaler)
        self._ranks = dist.get_world_size(self.group)
        self.passes = Passes(reduction == "sum", self._gradients, self._own_part_done, self._pass_over)
        self.passes.is_gathered, self.passes.largest = lambda: is_gathered(self.group), self._largest
        self.passes.ranks = lambda: frozenset(dist.get_process_group_ranks(self.group))
        self._round: _Round | None = None
        self._factor: torch.Tensor | None = None  # of the gradients that the running backward pass reduces
        self._summed: Any = None  # the work after which `_total` is the sum over ranks
        self._squares: list[_Reduced] | None = None  # of this round's reductions; None: not asked for
        self._shards.count_waits(self.waiting)
        self._shards.on_gradients(self._reducing)
        self._shards.on_methods(self._before_forward, self._after_forward)
        for module in model.modules():
            if isinstance(module, UnevenSyncBatchNorm) and reduction == "mean":
                module.loss_weight = lambda: self.passes.loss_weight()

    def _accumulate(self, batch: Any, parts: int | Sequence[int]) -> Iterator[Any]:
        """With numbers by rank, parameters and gradients are whole during the round.

        With one number, a rank with fewer samples than parts repeats its first one, with weight 0.
        """
        rows, whole = rows_of(batch), not isinstance(parts, int)
        own = parts if isinstance(parts, int) else parts[dist.get_rank(self.group)]
        cuts = cuts_of(rows, own, None if whole else own)
        source = (rows_between(batch, rows, *(cut if cut[0] < cut[1] else (0, 1))) for cut in cuts)
        return self._passes(source, len(cuts), whole, rows, of_one=True)

    def _agreed_parts(self, own: int) -> int:
        return self._largest(own)  # each pass gathers parameters

    def watch_gradients(self) -> None:
        """From now on keep the square norms of this rank's gradients: one for each pass that reduces."""
        self._squares = []

    def own_gradients(self) -> OwnGradients:
        """This rank's gradients of the round: one, or where each micro-batch is reduced at once, those."""
        assert self._squares is not None
        done = self._squares
        found = torch.zeros(max(1, len(done)), dtype=torch.float64, device=self.device)
        for number, one in enumerate(done):
            found[number] = one.square
        if self.peers is not None:
            dist.all_reduce(found, group=self.peers)
        samples, total, count = 0.0, 0.0, 0
        for one, square in zip(done, found.tolist(), strict=False):
            if weight := float(one.weight):
                total += square * float(one.unit) ** 2 / weight
                samples, count = samples + weight, count + 1
        return OwnGradients(samples, total, count)

    def _reducing(self, gradients: list[tuple[torch.Tensor, torch.Tensor]], reduces: bool) -> None:
        """A group of parameters has its gradients of a backward pass: weigh those that are reduced next."""
        if suspended() or not gradients:
            return
        if self._round is not None:
            self.passes.ways = self._round.ways
        self.passes.arrived()
        if not reduces and self._round is not None:
            return
        if not reduces:
            expected = "hook.accumulate(batch, parts) or hook.rounds(loader) around such passes"
            found = "a pass that does not reduce"
            self.passes.refuse(InputError("weighted_hook", "backward()", found, expected))
            self._shards.reduce_now()  # other ranks may wait for it
        if self._factor is None:
            try:
                self._shards.check_divisor(self._ranks)
            except InputError as refusal:
                self.passes.refuse(refusal)
            self._factor = self._factor_of(*self._own_weight())
        if self._squares is not None:
            self._watch(gradients, self._squares[-1])
        scale_in_place([gradient for _, gradient in gradients], self._factor)

    def _own_weight(self) -> tuple[Any, Any]:
        """As Passes.reduced(); nothing of what is refused, which is raised when the round is over."""
        try:
            return self.passes.reduced()
        except InputError as refusal:  # other ranks wait for these gradients
            self._refusal = self._refusal or refusal
            return 0.0, 0.0

    def _watch(self, gradients: list[tuple[torch.Tensor, torch.Tensor]], latest: _Reduced) -> None:
        for parameter, gradient in gradients:
            if id(parameter) in latest.seen:
                found = "a module that computes twice in a pass"
                raise InputError("GradientNoise", "gradients", found, "each once, to tell its square norm")
            latest.seen.add(id(parameter))
            square = gradient.double().square().sum()
            latest.square = latest.square + square / own_copies(parameter, self.peers)

    def state_dict(self) -> dict[str, Any]:
        """W of the latest round."""
        return {"total": None if self._total is None else float(self._total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a round of that W."""
        total = state.get("total")
        self._total = None if total is None else as_float64(total, self.device)

    def _rounds(self, loader: Any, parts: Sequence[int]) -> Iterator[Iterator[Any]]:
        own, source = parts[dist.get_rank(self.group)], iter(loader)
        for first in source:
            passes = self._passes(chain([first], source), own, len(set(parts)) > 1, own)
            yield passes
            if next(passes, None) is not None:
                expected = "a loop over all of them"
                raise InputError("rounds", "micro-batches of a round", "some that are left", expected)

    def _passes(
        self, source: Iterator[Any], count: int, whole: bool, filled: int, of_one: bool = False
    ) -> Iterator[Any]:
        """`count` micro-batches out of a source, of which the first `filled` have samples of their own."""
        if any(bool(one.any()) for one in self._gradients()):
            found, expected = "those of an earlier round", "zero_grad() before it"
            self.passes.refuse(InputError("accumulate", "gradients", found, expected))
        number, here, is_over = 0, _Round(whole), False
        self._round, self.passes.of_one = here, of_one
        self.passes.managed = self.passes.in_round = True
        with self._shards.restored():
            try:
                for number, micro in enumerate(islice(source, count), 1):
                    here.last, here.is_empty = number == count, number > filled
                    (self._shards.stay_whole if whole else self._shards.reduce_last)(number == count)
                    yield micro
                begun = here.weights or self.passes.is_pending
                is_over = number == count and (here.is_reduced or not begun)
            finally:
                self._round, self.passes.of_one = None, False
                self.passes.managed = self.passes.in_round = False
                if not is_over and not here.is_reduced:
                    self._refusal = None
                    self.passes.forget()
                    self._shards.forget_gradients()
        check_round(number, count, is_over)

    def _begin(self, weight: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._factor = None  # else of a backward pass that failed
        self.passes.begin(weight, False)

    def _gradients(self) -> list[torch.Tensor]:
        """Those of the passes since the last reduction; of earlier rounds, before this one's."""
        if self._round is None:
            return self._reduced_gradients()
        if not self._round.whole:
            return []  # each pass reduces
        return [gradient for _, gradient in self._shards.own_gradients()]

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's shards of them."""
        found: Any = [p.grad for p in self._parameters if p.grad is not None]
        return [getattr(gradient, "_local_tensor", gradient) for gradient in found]

    def _factor_of(self, weight: Any, unit: Any) -> torch.Tensor:
        """N unit / W, or N unit / A in a round of several passes that reduce."""
        here = self._round
        if here is not None and here.last and self.passes.again:  # once more: its samples are counted
            assert self._total is not None
            self._arrived()
            unit, known = here.unit, not_zero(self._total)
        elif here is None or here.whole:
            first = self._total is None
            self._total = self._send(weight, self.passes.shapes)
            self._arrived()
            if first:
                self._check_first(weight, float(self._total))
            known = not_zero(self._total)
        else:
            if here.is_empty:
                weight = unit = 0.0
            if here.assumed is None:
                here.assumed = self._guess(weight)
            known = here.assumed
            if not self.passes.again:
                here.weights.append(weight)
                here.shapes += self.passes.shapes
            if here.last:
                self._total = self._send(sum(here.weights), here.shapes)
        if here is not None:
            here.unit = unit
        means = self.reduction == "mean"
        if self._squares is not None:
            if here is None or here.whole or len(here.weights) == 1:  # the round's first
                self._squares.clear()
            self._squares.append(_Reduced(weight, unit if means else 1.0))
        factor = self._ranks * (as_float64(unit, self.device) if means else float(weight != 0)) / known
        return torch.as_tensor(factor)

    def _guess(self, weight: Any) -> torch.Tensor:
        """The W of the round before; in the first one, of all ranks' first passes."""
        if self._total is None:
            self._total = self._send(weight)
            self._arrived()
        return not_zero(self._total)

    def _send(self, weight: Any, shapes: Sequence[Shapes] = ()) -> torch.Tensor:
        """W, once _arrived() has been called. shapes: of its passes, where it is an assumption."""
        fingerprint = self._fingerprint(shapes)
        row = self.lockstep.row(self.device, 1 if self._refusal is None else REFUSED, fingerprint)
        message = torch.cat([as_float64(weight, self.device).view(1), row])
        self.lockstep.sent(message[1:])
        self._summed = dist.all_reduce(message, group=self.group, async_op=True)
        return message[0]

    def _arrived(self) -> None:
        with self.waiting.counted():
            self._summed.wait()

    def _own_part_done(self) -> None:
        """The backward pass is over on this rank; FSDP2 has still to wait for its reductions."""
        if self._round is None or self._round.last:
            self._ready()
        else:
            self.waiting.ready()

    def _pass_over(self) -> torch.Tensor | None:
        """So are these: W, of what is reduced in one pass."""
        is_reduced, self._factor = self._factor is not None, None
        if not is_reduced:
            self.passes.keep()
        elif self._round is None or self._round.last:
            if self._round is not None:
                self._round.is_reduced = True
                if not self._round.whole and not self.passes.again:
                    self._correct()
            if self.lockstep.is_due():
                self._arrived()
                self._compare_ranks(now=True)
                self._check_late()
            if (refusal := self._refused() or self.passes.refused()) is not None:
                raise refusal
        self.waiting.over()  # ranks that meet after it meet between passes
        return self._total if is_reduced and self._round is None else None

    def _correct(self) -> None:
        """Gradients that were divided by A are to be divided by W."""
        assert self._round is not None
        assert self._round.assumed is not None
        assert self._total is not None
        self._arrived()
        ratio = self._round.assumed / not_zero(self._total)
        if self.device.type == "cpu" and float(ratio) == 1.0:
            return
        with torch.no_grad():
            factor = float(ratio) if self.device.type == "cpu" else ratio
            torch._foreach_mul_(self._reduced_gradients(), factor)
