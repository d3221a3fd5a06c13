"""Passes: which forward passes a gradient comes from, and what they weigh.

A forward pass leaves marks in the graph behind its output. A backward pass that meets one names the pass that
it comes from, so it weighs what that pass did. A pass that is only looked at, in eval mode or in between,
weighs nothing. A gradient that meets no mark comes from samples that nothing has counted, and is refused.
What is refused is raised where the gradients are reduced: other ranks wait for these, and learn of it there.
A gradient of a gradient (a penalty's) need not meet the mark of its pass, so passes that
torch.autograd.grad(create_graph=True) went through count as met by the backward pass that follows.

A loss may come through several models, each with its own passes: one over prompts and one over images. If
these are different shares of all samples, neither share is the weight of that loss: it is refused.

Micro-batches of n_1, n_2, ... samples have the mean gradients g_1, g_2, ... The gradient of all of them is
sum(n_m g_m) / sum(n_m); passes that are just added up count alike. Where the loss stays the mean over its
micro-batch (managed), the gradients so far are multiplied by n_before / n_now before a micro-batch of another
size. After the last pass they are sum(n_m g_m) / n_last, and their weight is n_last / W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import torch

from pyps.errors import InputError
from pyps.torch.shapes import Shapes, attached
from pyps.torch.weighting import not_zero, scales_made, tensors_of

CLOSE = 1e-6  # shares that add up to 1, in float32
DEPTH = 4  # of objects in a model's output that are looked into
CACHE = "past_key_values"  # in an output: for a next call, not for a loss; padded to the longest of a batch
_engine: Any = torch.autograd.Variable._execution_engine


class Pass:
    """A forward pass. kept: its gradients are not reduced at once. share: of its rank's loss, and the total.

    weight: its samples (or targets), or a function that counts them once they are needed. shapes: of what it
    got and gave, where the weight is an assumption. counted: the round, by its number, in which it has had a
    backward pass that was kept; reduced: whether it has had one that was reduced. scales: calls of
    loss_scale() before it.
    """

    def __init__(self, weight: Any, kept: bool = False, in_eval: bool = False) -> None:
        self._weight, self.kept = weight, kept
        self.in_eval = in_eval or callable(weight)  # mostly no backward() comes
        self.share: float | None = None
        self.total: Any = None
        self.shapes: list[Shapes] = []
        self.counted, self.reduced = -1, False
        self.scales = scales_made()

    @property
    def weight(self) -> Any:
        if callable(self._weight):
            self._weight = self._weight()
        return self._weight


class Passes:
    """This rank's passes since the last reduction.

    sums: whether the losses are sums over samples, which need no weights among each other. gradients: the
    tensors that hold the gradients since the last reduction. on_computed: called at the end of a backward
    pass with gradients, before torch waits for reductions; on_over: after that; gives W if they are reduced.
    """

    # Of the latest backward pass: autograd's number of it, and of each model that it has reduced its passes,
    # w_i, W, and whether a script has set w_i.
    _models: ClassVar[tuple[int, list[tuple[ReferenceType[Passes], Any, torch.Tensor, bool]]]] = -1, []

    def __init__(
        self,
        sums: bool,
        gradients: Callable[[], list[torch.Tensor]],
        on_computed: Callable[[], None],
        on_over: Callable[[], torch.Tensor | None],
    ) -> None:
        self.is_gathered: Callable[[], bool] = lambda: False  # whether the running one's loss is all ranks'
        self._gathered = False  # the same, when it met its first pass
        self.largest: Callable[[int], int] = lambda own: own  # of all ranks that reduce this model
        self.ranks: Callable[[], frozenset[int]] = frozenset  # these
        self.managed = False  # whether each loss is the mean over its micro-batch
        self.of_one = False  # whether these are parts of one batch
        self.in_round = False  # whether accumulate() or rounds() gives them
        self.backwards = 0  # passes, each with a batch, of the round that runs, or was just reduced
        self.samples: int | None = 0  # of these, if they are known
        self._is_over = True  # whether it was
        self._sums, self._gradients = sums, gradients
        self._on_computed, self._on_over = on_computed, on_over
        self._open: Pass | None = None  # whose forward() is running
        self._latest: Pass | None = None
        self._said: Any = None  # set_weight()'s
        self._before: list[Pass] = []  # those before the running backward pass
        self._unit: Any = None  # the gradients so far, times this, are the sum over their samples
        self._running: list[Pass] | None = None  # those that the running backward pass has met
        self._task = -1  # autograd's number of that
        self._has_gradients = False  # whether it has reached a parameter
        self.number = 0  # of the round
        self.again = False  # whether what was reduced last are gradients of passes that were reduced before
        self._met: list[Pass] = []  # by the backward pass that was over last
        self._met_weight: Any = 0.0  # of that
        self._last_kept: tuple[torch.Tensor, int] | None = None  # a gradient, and its version then
        self._refusal: InputError | None = None  # of the gradients so far
        self._is_refused = False  # whether the running backward pass is
        self._differentiated: list[Pass] = []  # whose gradients are part of the graph of the pass to come
        self._weighs: Any = 0.0  # w_i of what was reduced last
        self._weighed: tuple[int, Any] | None = None  # passes met when that was, and what they weighed
        self.added = 1  # passes of that, if their gradients were added up as they are
        self.shapes: list[Shapes] = []  # of what was reduced last, where its weight is an assumption
        self.met = 1  # passes of its loss, if these have the same samples
        self._left_over = False  # whether there were gradients before the round
        self.ways = set[str]()  # how the passes of the round got their weights: set, or assumed

    def begin(self, weight: Any, kept: bool) -> None:
        """A forward pass begins."""
        if torch._C._current_graph_task_id() == -1:
            self._running = None  # else of a backward pass that failed
        if not callable(weight):  # what was only looked at is no part of the loss to come
            self._differentiated = [one for one in self._differentiated if not one.in_eval]
        self._open = self._latest = Pass(weight, kept)

    def end(self, output: Any, inputs: Any) -> None:
        """It is over, with this output. inputs: forward()'s, if their rows are taken for samples; or None."""
        begun, self._open = self._open, None
        if begun is not None:
            self._mark(output, begun, inputs)

    def apart(self, output: Any, weight: Any, in_eval: bool, inputs: Any) -> None:
        """A part of the model has computed this. Outside forward() it is a pass of its own.

        weight: its samples; None if they are not known.
        """
        if self._open is not None or torch._C._current_graph_task_id() != -1:  # a checkpoint computes again
            return
        if torch._C._functorch.peek_interpreter_stack() is None:  # else torch.func computes
            self._mark(output, Pass(weight, in_eval=in_eval), inputs)

    def _mark(self, output: Any, begun: Pass, inputs: Any) -> None:
        outputs = list(attached(output, DEPTH))
        if inputs is not None:
            cached = isinstance(output, dict) and CACHE in output
            of_loss = attached({k: v for k, v in output.items() if k != CACHE}, DEPTH) if cached else outputs
            begun.shapes = [Shapes(tensors_of(inputs), of_loss, inputs[1].get("labels"))]
        for tensor in outputs:
            base: Any = (
                tensor._base if tensor._is_view() else tensor
            )  # a view changed in place loses its node
            for node in {tensor.grad_fn, base.grad_fn} - {None}:
                assert node is not None
                node.register_prehook(lambda _, begun=begun: self._meet(begun))

    def set_weight(self, weight: Any) -> None:
        """What the backward pass that comes next weighs."""
        self._said = weight

    @property
    def within(self) -> bool:
        """Whether a forward() runs."""
        return self._open is not None

    @property
    def is_said(self) -> bool:
        """Whether a script has set that."""
        return self._said is not None

    def share(self, weight: Any, total: Any) -> Any:
        """weight / total: the latest pass's part of the rank's gradient; checked when that is reduced."""
        if not 0 <= float(weight) <= float(total):
            raise InputError("share", "weight, total", f"{weight}, {total}", "0 <= weight <= total")
        found = weight / total if float(total) else 0.0
        if self._latest is not None:
            self._latest.share, self._latest.total = float(found), total
        return found

    def loss_weight(self) -> Callable[[], Any]:
        """What the reduction multiplies the open pass's loss by, before 1 / W; known in its backward."""
        begun = self._open or self._latest

        def weight() -> Any:
            if begun is None:
                return 1.0
            return begun.total if begun.total is not None else self._weight_of([begun])

        return weight

    def arrived(self) -> None:
        """A gradient has reached a parameter."""
        if self._running is not None and self._has_gradients:
            return
        if self._running is None:
            self._start_unmet()
        assert self._running is not None
        self._has_gradients = True
        if not self._is_refused:
            try:
                self._check_ways(self._running)
                self._count_pass(self._running, self._weight_of(self._running))
            except InputError as refusal:
                self.refuse(refusal)

    def _check_ways(self, running: list[Pass]) -> None:
        """Raise InputError where a script has set some weights of a round, and not the others."""
        if self.is_said:
            self.ways.add("set")
        elif _shapes_of(running):
            self.ways.add("assumed")
        if len(self.ways) > 1:
            expected = "a call before each backward(), with the weight of that micro-batch; or count="
            raise InputError("weighted_hook", "set_weight()", "it for some micro-batches only", expected)

    def _start_unmet(self) -> None:
        """A backward pass that has met no mark."""
        if self._open is not None:  # within forward(), as in a step that calls backward() itself
            self._start(self._open)
            return
        if self._differentiated:
            self._start(self._differentiated[0])
            return
        kept = self._latest is not None and self._latest.kept
        self._start(Pass(0.0 if self._said is None else self._said, kept))
        if self._said is None:
            found = "a gradient of samples that no forward() of this model has counted"
            expected = "a loss from what model(...) returned, or hook.set_weight(n) before backward()"
            self.refuse(InputError("weighted_hook", "backward()", found, expected))

    def refuse(self, refusal: InputError) -> None:
        """The gradients so far must not be used."""
        self._is_refused = True
        self._refusal = self._refusal or refusal

    def refused(self) -> InputError | None:
        """What was refused of gradients that nothing reduces, once."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def _count_pass(self, running: list[Pass], weight: Any) -> None:
        if self._is_over:
            self.backwards, self.samples = 0, 0
        elif all(one.reduced or one.counted == self.number for one in running):
            return  # once more
        self._is_over = False
        if not self.of_one or not self.backwards:
            self.backwards += 1
        known = isinstance(weight, int) and not self.is_said
        self.samples = self.samples + weight if known and self.samples is not None else None

    def reduced(self) -> tuple[Any, Any]:
        """The gradients are complete: the rank's weight in W, and the weight that they are to be given.

        Raises InputError for gradients that must not be used.
        """
        self.arrived()
        try:
            if (refusal := self.refused()) is not None:
                raise refusal
            return self._weigh_all()
        except InputError:
            self._is_refused, self.again = True, False
            raise
        finally:
            self.forget()

    def check_met(self, met: list[Pass] | None = None) -> None:
        """All gradients are there. Raise InputError if passes that were met after a part was reduced change
        what they weigh. met: those of a backward pass that is over.
        """
        running = met or self._running
        if not running or self._weighed is None or self._weighed[0] == len(running) or self._is_refused:
            return
        try:
            if (whole := self._weight_of(running)) != self._weighed[1]:
                found = f"{float(self._weighed[1]):g} of {float(whole):g} samples when its reduction began"
                raise InputError("weighted_hook", "backward()", found, "hook.set_weight(n) before it")
        except InputError:
            self._is_refused = True
            raise

    def _weigh_all(self) -> tuple[Any, Any]:
        assert self._running is not None
        if all(one.kept for one in self._running):
            found = "a reduction within no_sync(), for a forward() before it without a backward()"
            expected = (
                "torch.no_grad() around such a forward(); static_graph: no no_sync() in the first round"
            )
            raise InputError("weighted_hook", "no_sync()", found, expected)
        own = self._weight_of(self._running)
        self._weighed = len(self._running), own
        self.met = 1 if any(one.share is not None for one in self._running) else len(self._running)
        total: Any = sum((one.weight for one in self._before), own)
        unit = total
        if self._before and self.managed and not self._sums:
            unit = unit_of(own, total)
        elif self._before and not self._sums:
            _check_shares([*self._before, _as_weighed(self._running, own)])
        self.shapes = [] if self.is_said else _shapes_of([*self._before, *self._running])
        shared = any(one.share is not None for one in self._before)
        self.added = 1 if self.managed or self._sums or shared else len(self._before) + 1
        self.again = all(one.reduced for one in self._running)
        for one in self._running:
            one.reduced = True
        self._weighs = total
        return total, unit

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that were kept and not reduced yet."""
        return bool(self._before)

    def forget(self) -> None:
        """No pass is pending."""
        self._before, self._unit, self._left_over, self._is_over = [], None, False, True
        self._refusal, self.ways = None, set()
        self.number += 1

    def _meet(self, begun: Pass) -> None:
        """The running backward pass comes from this forward pass."""
        if self._running is None or self._task != torch._C._current_graph_task_id():
            self._start(begun)
        elif begun not in self._running:
            self._running.append(begun)

    def _start(self, begun: Pass) -> None:
        self._running, self._task, self._has_gradients = [begun], torch._C._current_graph_task_id(), False
        self._gathered, self._is_refused, self._weighed = self.is_gathered(), False, None
        _engine.queue_callback(self._computed)
        if self._before:
            self._drop_kept()
        if self.managed or self._sums:
            try:
                self._join_earlier(self._running)
            except InputError as refusal:
                self.refuse(refusal)

    def _join_earlier(self, running: list[Pass]) -> None:
        """The gradients to come are added to those of earlier passes."""
        if not self._before:
            self._left_over = any(bool(one.any()) for one in self._gradients())
            if not self._left_over or not self._sums:
                return
        if self._left_over:
            expected = "optimizer.zero_grad() before a round of several passes, or of a sum"
            raise InputError("weighted_hook", "gradients", "those of an earlier round", expected)
        if not self._sums:
            self._change_unit(self._weight_of(running))

    def _change_unit(self, weight: Any) -> None:
        """Gradients so far count in samples of the pass before; from now on in samples of this one."""
        old, self._unit = self._unit, unit_of(weight)
        new = self._unit
        if not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor) and old == new:
            return
        with torch.no_grad():
            torch._foreach_mul_(self._gradients(), old / new)

    def _weight_of(self, passes: list[Pass]) -> Any:
        """What a backward pass weighs. Raises InputError if its forward passes weigh unlike."""
        if self._said is not None:
            return self._said
        if any(one.scales != scales_made() for one in passes):
            found = "one between forward() and backward()"
            expected = "the plain loss, which the hook weighs, or hook.set_weight(1) before backward(); "
            expected += "for a log torch.no_grad() around it"
            raise InputError("weighted_hook", "loss_scale()", found, expected)
        is_alone = len(passes) == 1 and not self._differentiated and not self._gathered
        if is_alone and passes[0].weight is not None:
            return passes[0].weight
        if self._gathered:
            expected = "hook.set_weight(1) before backward(): it is the same on each rank"
            raise InputError("weighted_hook", "backward()", "a loss over the outputs of all ranks", expected)
        every = [*passes, *self._differentiated]
        own = every[0].weight
        if len(every) > 1 and all(one.share is not None for one in every):  # parts of one loss
            return sum(one.weight for one in every)
        if own is None or any(one.weight is None or one.weight != own for one in every[1:]):
            weights = {"unknown" if one.weight is None else f"{float(one.weight):g}" for one in every}
            found = f"forward passes of {' and '.join(sorted(weights))} samples"
            expected = "as many in all passes of a loss, or hook.set_weight(n) before backward()"
            raise InputError("weighted_hook", "backward()", found, expected)
        return own

    def _computed(self) -> None:
        """A backward pass is over, but for what torch does then: its reductions."""
        if self._running is not None and self._has_gradients:
            self._on_computed()
        _engine.queue_callback(self._over)

    def _over(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if not self._has_gradients:  # torch.autograd.grad() asked for others
            if torch.is_grad_enabled():  # with create_graph
                self._differentiated += running
            return
        try:
            self.check_met(running)
        except InputError as refusal:  # the hook raises it, where it can on all ranks
            self.refuse(refusal)
        self._met_weight = 0.0 if self._is_refused else self._weight_of(running)
        is_said = self.is_said
        self._said, self._differentiated, self._met = None, [], running
        total = self._on_over()
        if total is not None and not self._sums:
            self._compare_models(total, is_said)

    def _compare_models(self, total: torch.Tensor, is_said: bool) -> None:
        """Raise InputError, on all ranks, if this backward pass has weighed another model otherwise on one.

        is_said: whether a script has set what the loss weighs.
        """
        own, found = self._weighs, ""
        if Passes._models[0] != self._task:
            Passes._models = self._task, []
        asked: dict[int, Passes] = {}  # those whose ranks all have both models
        for known, other, others, other_said in Passes._models[1]:
            passes = known() or self
            both = self if self.ranks() <= passes.ranks() else passes
            if both.ranks() <= self.ranks():
                asked[id(both)] = both
            if is_said or other_said:
                continue
            shares = [float(w) / float(not_zero(all_)) for w, all_ in ((own, total), (other, others))]
            if other != own and abs(shares[0] - shares[1]) > CLOSE:
                found = f"one loss of two models, of {float(other):g} and {float(own):g} samples"
        on_others = [both.largest(int(bool(found))) for both in asked.values()]
        if found or any(on_others):
            found = found or "one loss of two models, of unlike samples on other ranks"
            expected = "a backward() for each, or set_weight(n) of the loss on both hooks before it"
            raise InputError("weighted_hook", "backward()", found, expected)
        Passes._models[1].append((ref(self), own, total, is_said))

    @property
    def is_kept(self) -> bool:
        """Whether the backward pass that is over keeps its gradients, as its forward() said."""
        return self._met[0].kept and min(one.counted for one in self._met) < 0  # else nothing follows

    def keep(self) -> None:
        """Its gradients are not reduced yet. A second backward pass through it adds no samples."""
        weighed = _as_weighed(self._met, self._met_weight)
        if weighed.counted < self.number:
            self._before.append(weighed)
        self._unit = unit_of(weighed.weight)
        for one in self._met:
            one.counted = self.number
        kept = self._gradients()
        self._last_kept = (kept[0], kept[0]._version) if kept else None

    def _drop_kept(self) -> None:
        """Forget the passes whose gradients a script has set to zero since; within a round, refuse that."""
        before, gradients = self._last_kept, self._gradients()
        if before and gradients and before[0] is gradients[0] and before[1] == gradients[0]._version:
            return
        if any(bool(one.any()) for one in gradients):
            return
        self.forget()
        if self.in_round:
            expected = "zero_grad() and step() between rounds: only the last micro-batch reduces them"
            self.refuse(InputError("weighted_hook", "gradients", "none of earlier micro-batches", expected))


def _as_weighed(passes: list[Pass], weight: Any) -> Pass:
    """The passes of one backward pass, as one of this weight."""
    found = Pass(weight, passes[0].kept)
    shares = [one.share for one in passes]
    found.share = None if None in shares else sum(shares)  # type: ignore[arg-type]
    found.shapes = _shapes_of(passes)
    found.counted = min(one.counted for one in passes)
    return found


def _shapes_of(passes: list[Pass]) -> list[Shapes]:
    """Of those whose weights are assumptions."""
    return [shapes for one in passes for shapes in one.shapes]


def _check_shares(passes: list[Pass]) -> None:
    """Raise InputError for gradients that count alike although their micro-batches are not."""
    shares = [one.share for one in passes if one.share is not None]
    weights = [float(one.weight) for one in passes]
    found = ""
    if shares and (len(shares) < len(passes) or abs(sum(shares) - 1) > CLOSE):
        found = f"shares that add up to {sum(shares):.4g}, not 1"
    elif not shares and len(set(weights)) > 1:
        sizes = ", ".join(f"{w:g}" for w in weights)
        found = f"weights of {sizes}: loss / {len(weights)} would count them alike"
    if found:
        expected = "hook.accumulate(batch, parts) or hook.rounds(loader) with the plain loss, or each loss "
        expected += "times hook.share(len(micro), len(batch))"
        raise InputError("weighted_hook", "micro-batches", found, expected)


def unit_of(weight: Any, total: Any = 1.0) -> Any:
    """The weight, or 1 where nothing counts, which cannot be a unit; 0 if the total is 0."""
    if isinstance(weight, torch.Tensor) or isinstance(total, torch.Tensor):
        counted, total = torch.as_tensor(weight, dtype=torch.float64), torch.as_tensor(total)
        return torch.where(counted > 0, counted, 1.0) * (total > 0)
    return (weight or 1.0) if total else 0.0
