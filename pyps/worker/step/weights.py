"""The weights of a worker's gradients: in the sum of a step's micro-batches, and in their round's mean.

A gradient weighs as much as the loss was divided by: its samples, its targets, the sum of their class
weights. `worker.backward(loss)` reads that from the loss's graph (pyps.worker.step.terms). After a plain
`loss.backward()` the graph is freed: it still tells how many values a mean was over and that there were class
weights, and no longer how many targets counted. So such a gradient counts by its samples, and in a round it
is refused where the rest of the graph shows another divisor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pyps.errors import InputError
from pyps.worker.device.binding import Binding
from pyps.worker.step.step import Step
from pyps.worker.step.terms import MEAN, REDUCTIONS, SUMS_OF_LOSSES, THROUGH, Node, Term, shape_of, terms_of

ALIKE = 1e-6  # relative: sums of class weights are fp32
MOST_NODES = 2000  # of a freed graph that are looked at
CALL = "worker.backward(loss) in place of loss.backward(): it reads what the loss was divided by"


class Weights:
    """The weights of one worker's steps.

    rounds: whether its gradients become a mean with other workers'. local: whether it takes local steps,
    whose differences count by samples.
    """

    def __init__(self, *, rounds: bool, local: bool) -> None:
        self._rounds, self._local = rounds and not local, local
        self._ratios: tuple[float, ...] = ()  # of the terms' divisors to each other, or to the samples
        self._sums = False  # the last weight is what a sum was divided by
        self._by_loss: bool | None = None  # whether the script calls backward() here; None: not known yet

    def begin(self, step: Step, binding: Binding) -> None:
        """A micro-batch begins. Until its loss says otherwise it weighs as many as its samples."""
        step.by_loss = False
        if not self._local:
            _weigh(step, binding, float(step.micro))

    def backward(
        self, step: Step, binding: Binding, loss: torch.Tensor, n: float | None, options: dict[str, Any]
    ) -> None:
        """Run a loss's backward pass, and note its weight. Raises InputError for a loss whose divisor is not
        known, or not one for all of its terms.
        """
        again, before, nodes = step.by_loss, step.now, [loss.grad_fn]
        weight = float(step.micro)
        if not self._local and (n is not None or self._rounds or step.left or step.done):
            weight, nodes = self._read(loss, n, step.micro)
            if again and not math.isclose(weight, before, rel_tol=ALIKE):
                found = f"{before:g} in one, {weight:g} in another of the same batch"
                raise _refused(found, "one divisor for all: add the losses, then one backward()")
            _weigh(step, binding, weight)
        step.by_loss = True
        handles = [node.register_prehook(_zeros) for node in nodes if node is not None and weight == 0.0]
        try:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        binding.backward.end()

    def end(self, step: Step, binding: Binding, loss: Any, scaler: Any) -> Any:
        """A micro-batch ends; its loss, None where nothing counts. scaler: a GradScaler, whose scale a sum's
        divisor has in it. Raises InputError for a plain
        loss.backward() whose gradient cannot count by samples, and for a round's that has changed since.
        """
        if self._local:
            return loss
        if self._rounds or step.left or step.weight:
            if self._by_loss not in (None, step.by_loss):
                found = "loss.backward() for one batch and worker.backward(loss) for another"
                raise InputError("worker", "step", found, "worker.backward(loss) for all of them")
            self._by_loss = step.by_loss
        if self._rounds and step.by_loss:
            binding.backward.check_unchanged()
        if self._rounds and not step.by_loss and isinstance(loss, torch.Tensor):
            self._check_freed(loss, step.micro)
        step.weight += step.now
        step.loss_scale = float(scaler.get_scale()) if scaler is not None and self._sums else 1.0
        return loss if step.now > 0.0 else None

    def _read(self, loss: torch.Tensor, n: float | None, samples: int) -> tuple[float, list[Node]]:
        """Return what a loss was divided by, and the nodes at which its gradient enters."""
        if n is not None:
            if not 0.0 <= (count := float(n)) < math.inf:
                raise InputError("backward", "n", repr(n), "how many items the loss is a mean over")
            self._sums = False
            return count, [loss.grad_fn]
        terms = terms_of(loss)
        self._sums = bool(terms) and not terms[0].is_mean
        if not terms:
            return float(samples), []
        counts = [_count(term) for term in terms]
        if self._rounds and len(counts) > 1:
            self._check_terms(counts, samples)
        return counts[0], [term.node for term in terms]

    def _check_terms(self, counts: list[float], samples: int) -> None:
        """Refuse terms for which no single weight is right: it is if they share a divisor, or if each has the
        same multiple of the samples in every step.
        """
        first = counts[0]
        shared = all(math.isclose(count, first, rel_tol=ALIKE) for count in counts)
        if not shared and not all(_is_multiple(count, samples) for count in counts):
            raise _refused(_listed(counts), "terms over the same items, or over the samples")
        if first > 0.0:
            self._compare(tuple(count / first for count in counts), counts)

    def _check_freed(self, loss: torch.Tensor, samples: int) -> None:
        """Refuse a loss whose graph, after a plain backward(), shows that it is no mean over the samples."""
        counts = list(_left_in(loss, samples))
        for count in counts:
            if not _is_multiple(count, samples):
                raise _refused(f"{count:g} in a batch of {samples} samples", CALL)
        if counts:
            self._compare(tuple(count / samples for count in counts), counts)

    def _compare(self, ratios: tuple[float, ...], counts: list[float]) -> None:
        self._ratios = self._ratios or ratios
        same = len(ratios) == len(self._ratios) and all(
            math.isclose(a, b, rel_tol=ALIKE) for a, b in zip(ratios, self._ratios, strict=True)
        )
        if not same:
            raise _refused(f"{_listed(counts)}, in another proportion than before", CALL)


def _weigh(step: Step, binding: Binding, weight: float) -> None:
    """The micro-batch under way has this weight: what is accumulated is first brought to its unit, so that
    after the last the sum times unit / weight of all is the mean.
    """
    if weight > 0.0:
        if step.done and step.unit != weight:
            binding.scale_grads(step.unit / weight)
        step.unit = weight
    step.now = weight
    if not step.left:
        whole = step.weight + weight
        binding.last_backward(step.unit / whole if whole else 1.0)


def _count(term: Term) -> float:
    """Return what a term was divided by. Waits for a device that has it."""
    if term.count is None:
        raise _refused(f"nothing, in {term.kind}: a sum", "a mean, or backward(loss, n=count)")
    if not isinstance(term.count, torch.Tensor) and not term.counts_own():
        found = f"{abs(term.count):g}, which is no count of this batch's items"
        raise _refused(found, "a mean, or backward(loss, n=count)")
    return abs(float(term.count))


def _is_multiple(count: float, samples: int) -> bool:
    return count >= samples and math.isclose(count / samples, round(count / samples), rel_tol=ALIKE)


def _left_in(loss: torch.Tensor, samples: int) -> Iterator[float]:
    """Give what the means of a loss were over, as far as a freed graph tells; sums and what is unknown are
    left out. Refuses class weights, and targets of which some may have been ignored.
    """
    stack: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
    for _ in range(MOST_NODES):
        if not stack:
            return
        node = stack.pop()
        name, below = type(node).__name__, [n for n, _ in node.next_functions if n is not None]
        losses = name in SUMS_OF_LOSSES and below and shape_of(node.next_functions[0]) == ()
        if name in THROUGH or name == "StackBackward0" or losses:
            stack += below
        elif name in REDUCTIONS and getattr(node, "_saved_reduction", MEAN) == MEAN and not _penalty(node):
            if name.startswith("Nll"):
                yield _targets(node, name, samples)
            elif name.startswith("Mean"):
                yield float(node._saved_self_sym_numel)
            elif not name.startswith(("Sum", "Nansum", "Dot", "Vdot")) and node.next_functions[0][0]:
                shape = shape_of(node.next_functions[0])
                yield float(math.prod(shape[:1]) if "Margin" in name[:12] else math.prod(shape))


def _targets(node: Node, name: str, samples: int) -> float:
    try:
        weighted = node._saved_weight is not None
    except RuntimeError:  # it was there, and has been freed
        weighted = True
    if weighted:
        raise _refused("a sum of class weights", CALL)
    shape = shape_of(node.next_functions[0])
    rows = math.prod(shape) // shape[1] if len(shape) > 1 else 1
    if rows != samples:
        raise _refused(f"at most {rows} targets in a batch of {samples} samples", CALL)
    return float(rows)


def _penalty(node: Node) -> bool:
    """Return whether nothing below is data: every way leads to parameters."""
    stack, seen = [node], {node}
    while stack and len(seen) < MOST_NODES:
        for below, _ in stack.pop().next_functions:
            if below is None or (hasattr(below, "variable") and not _is_parameter(below)):
                return False
            if below not in seen:
                seen.add(below)
                stack.append(below)
    return not stack


def _is_parameter(node: Node) -> bool:
    return isinstance(node.variable, torch.nn.Parameter)


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


def _listed(counts: list[float]) -> str:
    return " and ".join(f"{count:g}" for count in counts)


def _refused(found: str, expected: str) -> InputError:
    return InputError("backward", "the loss's divisor", found, expected)
