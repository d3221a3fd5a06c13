"""Micro-batches: the gradient of a rank's samples out of several backward passes.

Micro-batches of n_1, n_2, ... samples have the mean gradients g_1, g_2, ... The gradient of all of them is
sum(n_m g_m) / sum(n_m); passes that are just added up count alike. In accumulate() the loss stays the mean
over its micro-batch: before a micro-batch of another size than the one before, the gradients so far are
multiplied by n_before / n_now. After the last pass they are sum(n_m g_m) / n_last, and their weight is
n_last / W.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from pyps.errors import InputError
from pyps.torch.peers import parameters_of
from pyps.torch.schedule import micro_batches
from pyps.torch.weighting import rows_of

CHECKED = 20  # rounds: reading weights of a GPU makes the CPU wait
CLOSE = 1e-6  # shares that add up to 1, in float32


class MicroBatches:
    """This rank's passes since the last reduction, and what each weighs.

    ddp: the model. sums: whether the losses are sums over samples, which need no weights among each other.
    managed: whether each loss is the mean over its micro-batch, as in accumulate().
    """

    def __init__(self, ddp: DistributedDataParallel, sums: bool) -> None:
        self.weight: Any = 0.0  # of the latest pass
        self.managed = False
        self._ddp, self._sums = ddp, sums
        self._before: list[Any] = []  # weights of the passes before the latest one
        self._kept = False  # whether the latest pass ran under no_sync()
        self._in_eval: Callable[[], Any] | None = None  # the weight of a pass that may have no backward()
        self._shares: list[float] = []
        self._shared: Any = None  # of the latest pass: the total that its loss is a share of
        self._unchecked = CHECKED  # rounds whose weights are still looked at

    def begin_in_eval(self, weight: Callable[[], Any]) -> None:
        """A forward pass begins in eval mode: alone it counts if its backward() comes."""
        if self._before or self._kept or not self._ddp.require_backward_grad_sync:
            self.begin(weight())
        else:
            self._in_eval = weight

    def begin(self, weight: Any) -> None:
        """A forward pass begins. One whose backward() never came is forgotten, unless under no_sync()."""
        self._in_eval = self._shared = None
        if self._kept:
            self._before.append(self.weight)
        self._kept = not self._ddp.require_backward_grad_sync
        self._change_unit(self._before[-1] if self._before else None, weight)
        self.weight = weight

    def set_weight(self, weight: Any) -> None:
        """The latest pass weighs something else than was counted."""
        self._in_eval = None
        self._change_unit(self.weight if self._before else None, weight)
        self.weight = weight

    def share(self, weight: Any, total: Any) -> Any:
        """weight / total: this pass's part of the rank's gradient, to be checked when that is reduced."""
        if not 0 <= float(weight) <= float(total):
            raise InputError("share", "weight, total", f"{weight}, {total}", "0 <= weight <= total")
        found = weight / total if float(total) else 0.0
        self._shares.append(float(found))
        self._shared = total
        return found

    @property
    def loss_weight(self) -> Any:
        """What the reduction will multiply the latest pass's loss by, before 1 / W."""
        return self.weight if self._shared is None else self._shared

    def reduced(self, rank: int) -> tuple[Any, Any]:
        """The gradients are complete: the rank's weight in W, and the weight that they are to be given."""
        if self._in_eval is not None:
            self.weight = self._in_eval()
        total: Any = sum(self._before, self.weight)
        if self._before and not self._sums and not self.managed:
            self._check(rank)
        unit = _unit(self.weight, total) if self.managed and self._before else total
        self.forget()
        return total, unit

    def forget(self) -> None:
        """No pass is pending."""
        self._before, self._shares, self._kept, self._in_eval = [], [], False, None

    def cut(self, batch: Any, parts: int) -> Iterator[Any]:
        """Tensors of a batch in `parts` micro-batches, each ready for a forward and a backward pass."""
        rows = rows_of(batch)
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise InputError("accumulate", "parts", repr(parts), "a whole number from 1")
        cuts = micro_batches(0, rows, min(parts, rows))
        return self.passes((rows_between(batch, rows, low, high) for low, high in cuts), len(cuts))

    def passes(self, source: Iterator[Any], count: int) -> Iterator[Any]:
        """`count` micro-batches out of a source; only the last one's backward pass reduces."""
        number, before, self.managed = 0, self.managed, True
        try:
            for number, micro in enumerate(islice(source, count), 1):
                with nullcontext() if number == count else self._ddp.no_sync():
                    yield micro
        finally:
            self.managed = before
            if number < count:
                self.forget()
        if number < count:
            raise InputError("accumulate", "micro-batches", f"{number}", f"{count} in this round")

    def rounds(self, loader: Any, count: int) -> Iterator[Iterator[Any]]:
        """The passes of each round of a loader that gives `count` micro-batches a round."""
        source = iter(loader)
        for first in source:
            passes = self.passes(chain([first], source), count)
            yield passes
            if next(passes, None) is not None:
                expected = "a loop over all of them"
                raise InputError("rounds", "micro-batches of a round", "some that are left", expected)

    def _change_unit(self, before: Any, now: Any) -> None:
        """Gradients so far count in samples of the pass before; from now on in samples of this one."""
        if not self.managed or self._sums or before is None:
            return
        old, new = _unit(before), _unit(now)
        if not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor) and old == new:
            return
        gradients = [p.grad for p in parameters_of(self._ddp) if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, old / new)

    def _check(self, rank: int) -> None:
        """Warn once of gradients that count alike although their micro-batches are not."""
        if self._unchecked == 0:
            return
        self._unchecked -= 1
        weights = [float(w) for w in (*self._before, self.weight)]
        said = ""
        if self._shares and abs(sum(self._shares) - 1) > CLOSE:
            said = f"the shares of its micro-batches add up to {sum(self._shares):.4g}, not 1"
        elif not self._shares and len(set(weights)) > 1:
            sizes = ", ".join(f"{w:g}" for w in weights)
            said = f"its micro-batches weigh {sizes}: loss / {len(weights)} would count them alike"
        if said:
            self._unchecked = 0
            warnings.warn(
                f"rank {rank}: {said}. Loop over hook.accumulate(batch, parts) or hook.rounds(loader) with "
                "the plain loss, or multiply each loss by hook.share(len(micro), len(batch))",
                stacklevel=2,
            )


def _unit(weight: Any, total: Any = 1.0) -> Any:
    """The weight, or 1 where nothing counts, which cannot be a unit; 0 if the total is 0."""
    if isinstance(weight, torch.Tensor) or isinstance(total, torch.Tensor):
        counted, total = torch.as_tensor(weight, dtype=torch.float64), torch.as_tensor(total)
        return torch.where(counted > 0, counted, 1.0) * (total > 0)
    return (weight or 1.0) if total else 0.0


def rows_between(batch: Any, rows: int, low: int, high: int) -> Any:
    """Some rows of all tensors that have as many as the batch; anything else as it is."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return leaf[low:high] if whole else leaf

    return tree_map(cut, batch)
