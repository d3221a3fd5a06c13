"""FSDPHook: the gradient of uneven batches, exactly, in FSDP2's own reduction; also HSDP.

FSDP2 averages: 1/N for each rank, whatever its batch. A backward pass that begins with N w_i / W in the place
of 1 makes that average sum_i (w_i / W) g_i, the gradient of the mean over all samples. So the hook multiplies
what flows back into the model's output, and no gradient is touched a second time. W is summed over the ranks
when the backward pass begins.

A round of several passes (accumulate, rounds) begins before W is known. Its passes take N w / A with the W of
the round before for A, the same on all ranks; after the last one, the shards are multiplied by A / W, unless
that is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyps.errors import InputError
from pyps.torch.accumulate import rows_between
from pyps.torch.fsdp_shards import ShardedModules
from pyps.torch.peers import own_copies
from pyps.torch.rounds import Rounds
from pyps.torch.schedule import micro_batches
from pyps.torch.weighted import OwnGradients, WeightedHook
from pyps.torch.weighting import as_float64, not_zero, rows_of

_engine: Any = torch.autograd.Variable._execution_engine


class _Pass:
    """A forward pass and the backward pass to come. scale: N w / W as float64 [], when that has begun.

    in_eval: gives the weight of a pass in eval mode, if its backward pass comes.
    """

    def __init__(self, weight: Any, last: bool, in_eval: Callable[[], Any] | None = None) -> None:
        self.weight, self.last, self.in_eval = weight, last, in_eval
        self.scale: torch.Tensor | None = None


class _Round:
    """A round of several passes. weights: of those whose backward pass has begun. assumed: A."""

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.last = False  # whether the pass that comes next is
        self.is_empty = False  # whether that has no samples of its own
        self.assumed: torch.Tensor | None = None


class _Reduced:
    """What is reduced at once, of a pass or of a round.

    weight: its samples. assumed: the W that it counts in. square: of this rank's gradient of the
    parameters that were seen.
    """

    def __init__(self) -> None:
        self.weight: Any = 0.0
        self.assumed: Any = 1.0
        self.square: Any = 0.0
        self.seen: set[int] = set()


class _Squares:
    """Square norms of this rank's gradients by reduction, and those under way."""

    def __init__(self) -> None:
        self.done: list[_Reduced] = []  # of this round
        self.current: _Reduced | None = None

    def add(self, weight: Any, assumed: Any, first: bool) -> None:
        """A pass goes into the reduction under way. first: of its round."""
        if first:
            self.done, self.current = [], None
        self.current = self.current or _Reduced()
        self.current.weight, self.current.assumed = self.current.weight + weight, assumed

    def reduced(self) -> None:
        """It is over."""
        if self.current is not None:
            self.done.append(self.current)
        self.current = None


class _Watched(torch.autograd.Function):
    """The same values, no view of them; a function of what flows back goes on to the model.

    A hook on the model's own tensor would also see what a loss within the model sends back, and torch drops
    the hooks of a view that is changed in place.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weighted: Callable[..., Any], begun: _Pass) -> torch.Tensor:
        ctx.weighted, ctx.begun = weighted, begun
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.weighted(gradient, ctx.begun), None, None


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
        self._pass: _Pass | None = None  # in forward()
        self._latest: _Pass | None = None
        self._round: _Round | None = None
        self._running = False  # whether a backward pass is
        self._summed: Any = None  # the work after which `_total` is the sum over ranks
        self._squares: _Squares | None = None  # of this rank's gradients; None: not asked for
        self._shards.count_waits(self.waiting)
        model.register_forward_hook(self._after_forward)

    def set_weight(self, weight: Any) -> None:
        """Set w_i of the micro-batch whose backward() comes next, in place of the counted one."""
        if self._latest is not None and not (self._round is not None and self._round.is_empty):
            self._latest.weight = weight

    def accumulate(self, batch: Any, parts: int | Sequence[int]) -> Iterator[Any]:
        """As in WeightedHook; with numbers by rank, parameters and gradients are whole during the round.

        A rank with fewer samples than parts repeats its first one, with weight 0.
        """
        own = parts if isinstance(parts, int) else parts[dist.get_rank(self.group)]
        if isinstance(own, bool) or not isinstance(own, int) or own < 1:
            raise InputError("accumulate", "parts", repr(parts), "a whole number from 1")
        rows = rows_of(batch)
        cuts = micro_batches(0, rows, own)
        source = (rows_between(batch, rows, *(cut if cut[0] < cut[1] else (0, 1))) for cut in cuts)
        return self._passes(source, own, not isinstance(parts, int), min(rows, own))

    def watch_gradients(self) -> None:
        """From now on keep the square norms of this rank's gradients: one for each pass that reduces."""
        self._squares = _Squares()
        self._shards.on_gradients(self._reducing)

    def own_gradients(self) -> OwnGradients:
        """This rank's gradients of the round: one, or where each micro-batch is reduced at once, those."""
        assert self._squares is not None
        done = self._squares.done
        found = torch.zeros(max(1, len(done)), dtype=torch.float64, device=self.device)
        for number, one in enumerate(done):
            found[number] = one.square
        if self.peers is not None:
            dist.all_reduce(found, group=self.peers)
        samples, total, count = 0.0, 0.0, 0
        for one, square in zip(done, found.tolist(), strict=False):
            if weight := float(one.weight):
                # What flowed back was N / A times the sum over samples.
                unit = self._ranks / float(one.assumed)
                samples, total, count = samples + weight, total + square / unit**2 / weight, count + 1
        return OwnGradients(samples, total, count)

    def _reducing(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A group of parameters has its gradients of the passes since the last reduction."""
        latest = self._squares.current if self._squares is not None else None
        if latest is None:
            return  # a pass without weights
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

    def _passes(self, source: Iterator[Any], count: int, whole: bool, filled: int) -> Iterator[Any]:
        """`count` micro-batches out of a source, of which the first `filled` have samples of their own."""
        number, self._round = 0, _Round()
        with self._shards.restored():
            try:
                for number, micro in enumerate(islice(source, count), 1):
                    self._round.last, self._round.is_empty = number == count, number > filled
                    (self._shards.stay_whole if whole else self._shards.reduce_last)(number == count)
                    yield micro
            finally:
                self._round = None
        if number < count:
            raise InputError("accumulate", "micro-batches", f"{number}", f"{count} in this round")

    def _begin(self, weight: Any) -> None:
        if self._round is None:
            self._pass = _Pass(weight, True)
        else:
            self._pass = _Pass(0 if self._round.is_empty else weight, self._round.last)
            if self._round.assumed is None:
                self._round.assumed = self._guess(weight)

    def _begin_in_eval(self, weight: Callable[[], Any]) -> None:
        if self._round is not None:
            self._begin(weight())
        else:
            self._pass = _Pass(None, True, weight)

    def _guess(self, weight: Any) -> torch.Tensor:
        """The W of the round before; in the first one, of all ranks' first passes."""
        if self._total is None:
            self._total = self._send(weight)
            self._arrived()
        return not_zero(self._total)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """The output, with what flows back into it multiplied."""
        begun, self._pass = self._pass, None
        if begun is None:
            return None
        self._latest = begun
        leaves, shape = tree_flatten(output)
        changed = [self._watched(leaf, begun) for leaf in leaves]
        if all(new is leaf for new, leaf in zip(changed, leaves, strict=True)):
            if begun.in_eval is not None:
                return None
            found = f"{type(output).__name__} without a tensor that has a gradient"
            expected = "tensors in tuples, lists and dicts"
            raise InputError("weighted_hook", "output of forward()", found, expected)
        return tree_unflatten(changed, shape)

    def _watched(self, leaf: Any, begun: _Pass) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        watched: torch.Tensor = _Watched.apply(leaf, self._weighted, begun)  # type: ignore[no-untyped-call]
        return watched

    def _weighted(self, gradient: torch.Tensor, begun: _Pass) -> torch.Tensor:
        if begun.scale is None:
            begun.scale = self._scale_of(begun)
        if not self._running:
            self._running = True
            _engine.queue_callback(lambda: self._own_part_done(begun.last))
        if gradient.device.type == "cpu":
            factor = float(begun.scale)
            return gradient * factor if factor else torch.zeros_like(gradient)
        # A mean over no targets sends NaN back: weight 0 makes it zero.
        return (gradient * begun.scale).masked_fill(begun.scale == 0, 0)

    def _scale_of(self, begun: _Pass) -> torch.Tensor:
        """N w / W, or N w / A in a round of several passes."""
        if begun.weight is None and begun.in_eval is not None:
            begun.weight = begun.in_eval()
        if self._round is None:
            if not self._shards.reduces:
                expected = "hook.accumulate(batch, parts) or hook.rounds(loader) around such passes"
                raise InputError("weighted_hook", "backward()", "a pass that does not reduce", expected)
            first = self._total is None
            self._total = self._send(begun.weight)
            self._arrived()
            if first:
                self._check_first(float(self._total))
            known = not_zero(self._total)
        else:
            assert self._round.assumed is not None
            known = self._round.assumed
            self._round.weights.append(begun.weight)
            if begun.last:
                self._total = self._send(sum(self._round.weights))
        if self._squares is not None:
            self._squares.add(begun.weight, known, self._round is None or len(self._round.weights) == 1)
        unit: Any = as_float64(begun.weight, self.device) if self.reduction == "mean" else 1.0
        scale: torch.Tensor = self._ranks * unit / known
        return scale

    def _send(self, weight: Any) -> torch.Tensor:
        """W, once _arrived() has been called."""
        message = self.lockstep.message(as_float64(weight, self.device))
        self._summed = dist.all_reduce(message, group=self.group, async_op=True)
        return message[0]

    def _arrived(self) -> None:
        with self.waiting.counted():
            self._summed.wait()

    def _own_part_done(self, last: bool) -> None:
        """The backward pass is over on this rank; FSDP2 has still to wait for its reductions."""
        self._running = False
        if self._squares is not None and self._shards.reduces_any:
            _engine.queue_callback(self._squares.reduced)  # after FSDP2's own
        if not last:
            return
        for observe in self.on_ready:
            observe()
        if self._round is not None:
            _engine.queue_callback(self._correct)  # after FSDP2's own

    def _correct(self) -> None:
        """Gradients that were divided by A are to be divided by W."""
        assert self._round is not None
        assert self._round.assumed is not None
        assert self._total is not None
        self._arrived()
        ratio = self._round.assumed / not_zero(self._total)
        if self.device.type == "cpu" and float(ratio) == 1.0:
            return
        gradients: Any = [p.grad for p in self._parameters if p.grad is not None]
        shards = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        torch._foreach_mul_(shards, float(ratio) if self.device.type == "cpu" else ratio)
