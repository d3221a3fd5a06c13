"""The terms of a loss: what each was divided by, read from the loss's own autograd graph.

`terms_of(loss)` walks from the loss down through what is linear (sums, differences, products with and
quotients by constants, casts, views, stacks of losses) to the reductions, and asks each what it divided by.
A reduction is a mean, whose node has kept its divisor, or a sum, which the script may have divided by a count
of its own. The gradient enters at each term's node, times N n / W: n is the term's
count on this rank, W the sum of the counts over N ranks.

A sum or mean under which nothing is data (a penalty on weights) is no term here: it counts once, as it is.
What the tables below do not know is refused by its name.

The walk is the host's work, of some microseconds. A count that is on a device stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyps.errors import InputError

OWN_BATCHES = "the model's BatchNorm takes its statistics from each rank's own batch, small on slow ranks"
Node = Any  # torch.autograd.graph.Node, whose saved values no stub declares
Number = float | torch.Tensor  # a tensor of no dimensions

MEAN, SUM = 1, 2  # at::Reduction
MOST_STEPS = 20_000  # edges of a walk; a loss that reaches its terms in more ways than that is refused
FEW = 64  # nodes below a sum that are looked at for what was counted, or for a reduction over samples

INSTEAD = (
    "a loss made of sums and means of items, or `n=` (how many items this rank's loss is a mean over): "
    "backward(loss, n=count)"
)


@dataclass(eq=False, slots=True)
class Term:
    """One reduction of a loss.

    `node` is where its gradient enters; `kind` is its name. `count` is what it is a mean over: the node's own
    divisor where `is_mean`, else what the script divides the sum by; None where a sum is divided by nothing.
    A mean is multiplied by `constant` (the host's number) and divided by `divisor` (a tensor on a device, or
    None) besides, which must be alike on all ranks. Tensors have no dimensions.
    """

    node: Node
    kind: str
    is_mean: bool
    count: Number | None
    constant: float = 1.0
    divisor: torch.Tensor | None = None
    divisors: tuple[float, ...] = ()  # the host's numbers that a sum was divided by, one by one
    quotients: tuple[float, ...] = ()  # what `/` divided by, the outermost first; NaN for what is on a device
    smoothing: bool = False  # the part of cross_entropy that smooths labels: torch divides it by a count

    def counts_own(self, samples: int | None = None) -> bool:
        """Tell whether the graph shows that a sum is divided by a count of this rank's own items.

        It is the number of values or rows, or the sum of a mask or of weights that the values were multiplied
        by. Ask only where the ranks' counts are the same number, as a constant would be: this reads masks.
        samples: this rank's, if known: what counts a dimension of another length is no count of items.
        """
        return self.is_mean or self.smoothing or any(_counted(self.node, n, samples) for n in self.divisors)

    def divided_by(self, number: float) -> bool:
        """Tell whether the script has divided this term by a number besides the count of a sum."""
        has_count = not self.is_mean and self.count is not None
        return number in (self.quotients[:-1] if has_count else self.quotients)

    def unclamped(self) -> float:
        """Return the count of a sum divided by 1: 0 where no value was chosen, and clamp(min=1) has hidden
        that. Raises InputError where the graph does not tell.
        """
        if math.prod(_sizes(self.node)) == 0:
            return 0.0
        if self.counts_own():
            return 1.0
        if any(not bool(saved.any()) for saved in _weights(self.node)):
            return 0.0
        expected = "its mask in the sum, or the count of this rank's items: backward(loss, n=count)"
        raise _refused("a sum divided by 1, which may be a count of 0 after clamp(min=1)", expected)

    def adds_up(self, samples: int | None) -> bool:
        """Tell whether a mean is over sums, or a sum over means, that are each over the samples."""
        for below in _chain(self.node):
            inner = type(below).__name__
            if inner in ("SumBackward1", "MeanBackward1"):
                sizes = below._saved_self_sym_sizes
                over = {sizes[d] for d in _dims(below)}
                return inner[:3] != self.kind[:3] and samples != sizes[0] and samples in over
        return False


@dataclass(slots=True)
class _Path:
    """A way down: the node, which of its outputs, and what the way has divided by."""

    node: Node
    output: int
    by: tuple[float, ...] = ()  # the host's numbers
    device: torch.Tensor | None = None  # the product of those on a device, or one for each of several losses
    quotients: tuple[float, ...] = ()  # as of a Term

    def through(self, edge: tuple[Node, int], *by: float) -> _Path:
        return _Path(edge[0], edge[1], (*self.by, *by), self.device, self.quotients)


def terms_of(loss: torch.Tensor) -> list[Term]:
    """Return the terms of a real loss of one value, in the order in which the loss was written.

    There are none where the loss depends on parameters alone. Raises InputError for a loss that has no graph,
    is complex or holds several values, and for an operation that is not known, by its name, with what to
    write instead.
    """
    if loss.grad_fn is None:
        what = "a leaf" if loss.requires_grad else "a tensor without a gradient"
        raise _refused(what, "a loss that the model has computed with gradients enabled")
    if loss.is_complex() or loss.numel() != 1:
        raise _refused(f"{loss.dtype} of shape {tuple(loss.shape)}", "a real loss of one value")
    walk = _Walk()
    walk.run(_Path(loss.grad_fn, loss.output_nr))
    return list(walk.found.values())


@dataclass(slots=True)
class _Walk:
    found: dict[Node, Term] = field(default_factory=dict)
    within: dict[Node, Node] = field(default_factory=dict)  # a term's node -> the product where it is weighed

    def run(self, start: _Path) -> None:
        """Find the terms below a way."""
        stack, steps = [start], 0
        while stack:
            steps += 1
            if steps > MOST_STEPS:
                raise _refused("a loss with too many ways to its terms", INSTEAD)
            stack += reversed(list(self.below(stack.pop())))

    def below(self, path: _Path) -> Iterator[_Path]:
        """Take one node: give the ways that lead on, or note its term."""
        node, name = path.node, type(path.node).__name__
        reduction = REDUCTIONS.get(name)
        if name == "torch::autograd::AccumulateGrad" or name == "AccumulateGrad":
            return  # a parameter itself, or a leaf under which there is no model
        if reduction is not None and not (name in SUMS_OF_LOSSES and _of_losses(node.next_functions[0])):
            self.reduce(path, reduction(node))
        elif name in PRODUCTS:
            yield from self.product(path, node)
        elif name in SUMS_OF_LOSSES:
            edge = node.next_functions[0]
            yield path.through(edge, *((float(_numel(edge)),) if name.startswith("Mean") else ()))
        elif name in ("StackBackward0", "CatBackward0"):
            yield from _parts(path, node)
        elif name == "_DDPSinkBackward":
            yield path.through(node.next_functions[path.output])
        elif name in LINEAR:
            yield from _linear(path, node)
        elif not _of_parameters(node):
            raise _refused(name, HINTS.get(name, INSTEAD))

    def reduce(self, path: _Path, kept: Number | None) -> None:
        """Note a term: a mean over `kept`, or a sum where it is None. Refuse what is not over samples."""
        node, name = path.node, type(path.node).__name__
        if name in OVER_ALL and _of_parameters(node):
            return
        by, device = math.prod(path.by), path.device
        if device is not None and device.dim():
            raise _refused(f"{name} times several numbers", "one number for each loss")
        if math.isinf(by):
            return  # times 0: a loss that only names its parameters
        if name in OVER_ALL:
            kept = _nested(node, name, kept)
        if kept is not None:
            constant = math.inf if by == 0 else 1 / by
            term = Term(node, name, True, kept, constant, device, quotients=path.quotients)
        else:
            bare = device is None and all(n == -1 for n in path.by)  # a count may be 1
            count = None if bare else by if device is None else device * by
            term = Term(
                node,
                name,
                False,
                count,
                divisors=path.by,
                quotients=path.quotients,
                smoothing=_smooths(node),
            )
        self.note(term)

    def note(self, term: Term) -> None:
        """Add a term; one that is reached again has the sum of its constants."""
        before = self.found.get(term.node)
        if before is None and term.node not in self.within:
            self.found[term.node] = term
        elif before is None or before.divisor is not None or term.divisor is not None or not term.is_mean:
            if before is None or before.count is not None or term.count is not None:
                raise _refused(f"{term.kind} that the loss uses twice, divided in two ways", INSTEAD)
        else:
            before.constant += term.constant

    def product(self, path: _Path, node: Node) -> Iterator[_Path]:
        """Go through a product with a constant; or a term times a function of parameters, weighed as one."""
        edges = node.next_functions
        name = type(node).__name__
        if len(edges) == 1 or edges[1][0] is None:
            yield _divided(path, edges[0], node._saved_other, inverse=name.startswith("Mul"))
        elif edges[0][0] is None:
            if name.startswith("Div"):
                raise _refused(f"{name}: a number over a loss", INSTEAD)
            yield _divided(path, edges[1], node._saved_self, inverse=True)
        elif _of_parameters(node):
            return
        elif _of_parameters(edges[1][0]) or (name.startswith("Mul") and _of_parameters(edges[0][0])):
            self.hoist(path, node, edges[0] if _of_parameters(edges[1][0]) else edges[1])
        else:
            raise _refused(f"{name} of two values that both depend on data", INSTEAD)

    def hoist(self, path: _Path, node: Node, edge: tuple[Node, int]) -> None:
        """Weigh a term at its product with a learned number, whose gradient needs the weight as well."""
        inner = _Walk()
        inner.run(path.through(edge))
        if len(inner.found) != 1 or node in self.found:
            raise _refused(
                f"{type(node).__name__}: a learned number times several losses", "a product for each loss"
            )
        (term,) = inner.found.values()
        if term.node in self.found or term.node in self.within or inner.within:
            raise _refused(f"{term.kind} that the loss uses twice", INSTEAD)
        self.within[term.node] = node
        term.node = node
        self.found[node] = term


def quotients_of(loss: torch.Tensor) -> tuple[float, ...]:
    """Return what `/` divided a loss by whose count the script gives, as a Term's; without a sum's count."""
    path = _Path(loss.grad_fn, loss.output_nr)
    while type(path.node).__name__ in THROUGH:
        ways = [edge for edge in path.node.next_functions if edge[0] is not None]
        if len(ways) != 1:
            break
        is_quotient, other = (
            type(path.node).__name__.startswith("Div"),
            getattr(path.node, "_saved_other", None),
        )
        path = _divided(path, ways[0], other, False) if is_quotient else path.through(ways[0])
    return path.quotients[:-1] if type(path.node).__name__ in SUMS else path.quotients


def are_of_samples(terms: list[Term], samples: int | None) -> bool:
    """Tell whether each sample has a term of its own, over unlike numbers of items: which is the mean over
    samples, and not over items. samples: this rank's, if known.
    """
    if len(terms) < 2 or samples not in (None, len(terms)):
        return False
    tops = [_selected(term.node) for term in terms]
    if tops[0] is None or tops[0][1] != len(terms) or any(top != tops[0] for top in tops):
        return False
    counts = [term.count for term in terms]
    return any(isinstance(count, torch.Tensor) or count != counts[0] for count in counts)


def _selected(node: Node) -> tuple[Node, int] | None:
    """Return the value of whose first dimension a term has one entry, and the length of that."""
    for _ in range(FEW):
        edge = next((edge for edge in node.next_functions if edge[0] is not None), None)
        if edge is None:
            return None
        if type(node).__name__ in ("SelectBackward0", "UnbindBackward0") and node._saved_dim == 0:
            return edge[0], shape_of(edge)[0]
        node = edge[0]
    return None


def _linear(path: _Path, node: Node) -> Iterator[_Path]:
    """Go on to all inputs of a sum, a view or a cast."""
    signs = (1.0, 1.0)
    name = type(node).__name__
    if name in ("AddBackward0", "SubBackward0"):
        signs = (1.0, float(node._saved_alpha) * (-1.0 if name == "SubBackward0" else 1.0))
    elif name == "RsubBackward1":
        signs = (-1.0, -1.0)
    elif name == "NegBackward0":
        signs = (-1.0, 1.0)
    for edge, sign in zip(node.next_functions, signs, strict=False):
        if edge[0] is not None:
            yield path.through(edge) if sign == 1.0 else path.through(edge, 1 / sign if sign else math.inf)


def _divided(path: _Path, edge: tuple[Node, int], other: Any, inverse: bool) -> _Path:
    """Go through a product with (inverse) or a quotient by a constant; a host's number joins the host's."""
    if other is None:
        raise _refused(f"{type(path.node).__name__} by what its graph has not kept", INSTEAD)
    if isinstance(other, complex) or (isinstance(other, torch.Tensor) and other.is_complex()):
        raise _refused(f"{type(path.node).__name__} by a complex number", "real numbers")
    if isinstance(other, torch.Tensor):
        other = _local(other.detach())
    if not isinstance(other, torch.Tensor) or (other.numel() == 1 and other.device.type == "cpu"):
        value = float(other)
        found = path.through(edge, (1 / value if value else math.inf) if inverse else value)
        found.quotients += () if inverse else (value,)
        return found
    wide = torch.float32 if other.device.type == "mps" else torch.float64
    factor = other.to(wide).squeeze() if other.numel() == 1 else other.to(wide)
    factor = factor.reciprocal() if inverse else factor
    there = factor if path.device is None else path.device * factor
    return _Path(edge[0], edge[1], path.by, there, path.quotients + (() if inverse else (math.nan,)))


def _parts(path: _Path, node: Node) -> Iterator[_Path]:
    """Go on to the losses of a stack; each takes its own of several numbers."""
    several = path.device is not None and path.device.dim() > 0
    if several and any(_numel(edge) != 1 for edge in node.next_functions):
        raise _refused(f"{type(node).__name__} times several numbers", "a stack of losses of one value")
    factors = path.device.flatten() if several and path.device is not None else None
    if factors is not None and len(factors) != len(node.next_functions):
        raise _refused(f"{type(node).__name__} times {len(factors)} numbers", "one number for each loss")
    for k, edge in enumerate(node.next_functions):
        if edge[0] is None:
            continue
        if factors is None:
            yield path.through(edge)
        elif factors.device.type == "cpu":
            yield _Path(edge[0], edge[1], (*path.by, float(factors[k])), None, path.quotients)
        else:
            yield _Path(edge[0], edge[1], path.by, factors[k], path.quotients)


def _local(value: torch.Tensor) -> torch.Tensor:
    """The values on this device of a DTensor that every device holds whole."""
    if not hasattr(value, "to_local"):
        return value
    spread: Any = value
    if not all(p.is_replicate() for p in spread.placements):
        raise _refused("a divisor that is spread over devices", "one that each holds whole")
    return torch.as_tensor(spread.to_local())


def shape_of(edge: tuple[Node, int]) -> tuple[int, ...]:
    return tuple(edge[0]._input_metadata[edge[1]].shape)


def _numel(edge: tuple[Node, int]) -> int:
    return math.prod(shape_of(edge)) if edge[0] is not None else 1


def _of_losses(edge: tuple[Node, int]) -> bool:
    """Tell whether a value is made of losses: of no dimensions, or stacked and added up from such."""
    stack, seen = [edge], set()
    while stack:
        node, output = stack.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        if not shape_of((node, output)):
            continue
        name = type(node).__name__
        if name not in THROUGH and name not in ("StackBackward0", "CatBackward0"):
            return False
        if len(seen) > FEW * len(node.next_functions):
            return False
        stack += [e for e in node.next_functions if e[0] is not None]
    return True


def _of_parameters(node: Node) -> bool:
    """Tell whether nothing under a node is data: its operations take no other tensor than parameters."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name in ("AccumulateGrad", "torch::autograd::AccumulateGrad"):
            if not isinstance(node.variable, torch.nn.Parameter):
                return False  # an input that asks for its own gradient
            continue
        if name not in OF_PARAMETERS and name not in THROUGH:
            return False
        for below, _ in node.next_functions:
            if below is None:
                if not _by_a_number(node, name):
                    return False
            elif below not in seen:
                seen.add(below)
                stack.append(below)
    return True


def _by_a_number(node: Node, name: str) -> bool:
    """Tell whether the input without a gradient is a number, or is added, which changes no weight."""
    if name not in PRODUCTS:
        return name in ("AddBackward0", "SubBackward0", "RsubBackward1")
    others = (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None))
    known = [o for o in others if o is not None]
    return bool(known) and all(
        not isinstance(o, torch.Tensor) or o.numel() == 1 or o.requires_grad for o in known
    )


def _chain(node: Node) -> Iterator[Node]:
    """The nodes below a reduction that take each value by itself, down to the first that does not."""
    for _ in range(FEW):
        live = [below for below, _ in node.next_functions if below is not None]
        if len(live) != 1:
            return
        (node,) = live
        yield node
        if type(node).__name__ not in EACH_VALUE:
            return


def _dims(node: Node) -> set[int]:
    """The dimensions over which a reduction goes; all where it names none."""
    many, named = len(_sizes(node)), node._saved_dim
    dims = range(many) if named is None or len(named) == 0 else named
    return {int(d) if d < many else int(d) - 2**64 + many for d in dims}


def _nested(node: Node, name: str, kept: Number | None) -> Number | None:
    """Return what a mean of means is over: all their values. Refuse where samples were added up first.

    `x.mean(1).mean()` is the mean of all of x. `x.sum(0).mean()` is a mean over what is not samples, and
    `x.mean(0).sum()` a sum over it.
    """
    for below in _chain(node):
        inner = type(below).__name__
        if inner == "GatherBackward":
            raise _refused(
                "a loss that DataParallel gathered", "DistributedDataParallel, a process for each device"
            )
        if inner in ("VarBackward0", "StdBackward0") and 0 in _dims(below):
            raise _refused(f"{inner} over the samples of a batch", INSTEAD)
        if inner not in ("SumBackward1", "MeanBackward1"):
            continue
        if kept is None:
            if inner == "MeanBackward1" and 0 in _dims(below):
                raise _refused("a sum of means over the first dimension", INSTEAD)
        elif inner == "MeanBackward1":
            kept = kept * math.prod(below._saved_self_sym_sizes[d] for d in _dims(below))
        elif 0 in _dims(below):
            raise _refused("a mean of sums over the first dimension", INSTEAD)
    return kept


def _smooths(node: Node) -> bool:
    """Tell whether a sum is the part of torch's cross_entropy that smooths labels."""
    names = [type(below).__name__ for below in _chain(node)]
    return names[:3] == ["MaskedFillBackward0", "NegBackward0", "SumBackward1"]


def _sizes(node: Node) -> tuple[int, ...]:
    """The shape of what a sum adds up."""
    kept = getattr(node, "_saved_self", None)
    return tuple(getattr(node, "_saved_self_sym_sizes", () if kept is None else kept.shape))


def _counted(node: Node, n: float, samples: int | None = None) -> bool:
    """Tell whether n counts the values or rows of a sum, or is the sum of a mask or weights of theirs."""
    sizes = _sizes(node)
    first = sizes.index(samples) if samples in sizes else 0
    if n in {math.prod(sizes[: k + 1]) for k in range(first, len(sizes))}:
        return True
    if len(sizes) > 1 and first != 1 and n * sizes[1] == math.prod(sizes):
        return True  # of probabilities: torch divides by all dimensions but that of the classes
    for saved in _weights(node):
        total = float(saved.sum(dtype=torch.float64))
        if math.isclose(total, n, rel_tol=1e-5) or math.isclose(saved.numel() - total, n, rel_tol=1e-5):
            return True
    return False


def _weights(node: Node) -> Iterator[torch.Tensor]:
    """The host's masks and weights that the values of a sum were multiplied by, filled or chosen with."""
    stack = [node]
    for _ in range(FEW):
        if not stack:
            return
        node = stack.pop()
        for key in ("_saved_other", "_saved_self", "_saved_tensor", "_saved_mask", "_saved_condition"):
            saved = getattr(node, key, None)
            if isinstance(saved, torch.Tensor) and not saved.requires_grad and saved.device.type == "cpu":
                yield saved
        if type(node).__name__ in EACH_VALUE or type(node).__name__ in REDUCTIONS:
            stack += [below for below, _ in node.next_functions if below is not None]


def _refused(found: str, expected: str) -> InputError:
    return InputError("backward", "loss", found, expected)


# The tables. Names are those of torch 2.4 to 2.13.


def _elements(node: Node) -> Number | None:
    """A mean over all elements of the input."""
    return float(node._saved_self.numel()) if node._saved_reduction == MEAN else None


def _rows(node: Node) -> Number | None:
    """A mean over the rows of the input."""
    kept = node._saved_self
    return float(kept.shape[0] if kept.dim() > 1 else 1) if node._saved_reduction == MEAN else None


def _total_weight(node: Node) -> Number | None:
    """A mean by class weights, without the targets that are ignored."""
    if node._saved_reduction != MEAN:
        return None
    total = _local(node._saved_total_weight.detach())
    return float(total) if total.device.type == "cpu" else total


def _over_dims(node: Node) -> Number | None:
    """A mean over dimensions, which must be all: what is left may be samples."""
    _all_dims(node)
    return float(node._saved_self_sym_numel)


def _sum_over_dims(node: Node) -> Number | None:
    _all_dims(node)
    return None


def _all_dims(node: Node) -> None:
    if len(_dims(node)) < len(node._saved_self_sym_sizes):
        raise _refused(f"{type(node).__name__} over some dimensions, then chosen from", INSTEAD)


# A reduction's name -> what it has divided by, or None for a sum.
REDUCTIONS: dict[str, Callable[[Node], Number | None]] = {
    "MeanBackward0": lambda node: float(node._saved_self_sym_numel),
    "MeanBackward1": _over_dims,
    "SumBackward0": lambda node: None,
    "SumBackward1": _sum_over_dims,
    "NansumBackward0": lambda node: None,
    "DotBackward0": lambda node: None,
    "VdotBackward0": lambda node: None,
    "NllLossBackward0": _total_weight,
    "NllLoss2DBackward0": _total_weight,
    "MseLossBackward0": _elements,
    "HuberLossBackward0": _elements,
    "SmoothL1LossBackward0": _elements,
    "BinaryCrossEntropyBackward0": _elements,
    "BinaryCrossEntropyWithLogitsBackward0": _elements,
    "SoftMarginLossBackward0": _elements,
    "MultiMarginLossBackward0": _rows,
    "MultilabelMarginLossBackward0": _rows,
}
SUMS_OF_LOSSES = frozenset({"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"})
SUMS = frozenset({"SumBackward0", "SumBackward1", "NansumBackward0", "DotBackward0", "VdotBackward0"})
OVER_ALL = SUMS_OF_LOSSES | {"NansumBackward0", "DotBackward0", "VdotBackward0"}
PRODUCTS = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
LINEAR = frozenset(
    {"AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward0", "RsubBackward1"}
    | {"NegBackward0", "CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ContiguousBackward0"}
    | {"CopyBackwards", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SelectBackward0"}
    | {"UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"}
)
THROUGH = LINEAR | PRODUCTS
# What takes each value by itself: below a reduction it is looked through.
EACH_VALUE = (THROUGH | {"MaskedFillBackward0", "WhereBackward0"}) - {"SelectBackward0"}
# What a penalty on weights is made of: operations that take no data besides their inputs with gradients.
OF_PARAMETERS = SUMS_OF_LOSSES | frozenset(
    {"AbsBackward0", "PowBackward0", "SqrtBackward0", "RsqrtBackward0", "ExpBackward0", "Expm1Backward0"}
    | {"LogBackward0", "Log1PBackward0", "ReluBackward0", "SoftplusBackward0", "SigmoidBackward0"}
    | {"ClampBackward0", "ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0", "ReciprocalBackward0"}
    | {"TanhBackward0", "NormBackward0", "NormBackward1", "LinalgVectorNormBackward0", "SoftmaxBackward0"}
    | {"LogsumexpBackward0", "MmBackward0", "BmmBackward0", "MvBackward0", "DotBackward0", "TBackward0"}
    | {"TransposeBackward0", "PermuteBackward0", "SliceBackward0", "ExpandBackward0", "DiagonalBackward0"}
    | {"TriuBackward0", "TrilBackward0", "TraceBackward0", "MaxBackward1", "MinBackward1", "AmaxBackward0"}
    | {"LinalgSvdBackward0", "LinalgDetBackward0", "LinalgSlogdetBackward0", "VarBackward0", "StdBackward0"}
    | {"SplitWithSizesBackward0", "SplitBackward0", "UnbindBackward0", "WeightNormInterfaceBackward0"}
    | {"LogSigmoidBackward0", "MulBackward0", "DivBackward0", "AminBackward0", "CosBackward0", "SinBackward0"}
    | {"LogSoftmaxBackward0", "StackBackward0", "CatBackward0"}
)
# What to write instead of an operation that hides what a loss was divided by.
HINTS = {
    "CompiledFunctionBackward": "the loss computed outside torch.compile, or `n=`: backward(loss, n=count)",
    "CheckpointFunctionBackward": "checkpoint(..., use_reentrant=False), or `n=`: backward(loss, n=count)",
    "GatherBackward": "DistributedDataParallel, a process for each device",
    "_AllReduceBackward": "this rank's own loss, not one that is already reduced over ranks",
    "AllReduceBackward": "this rank's own loss, not one that is already reduced over ranks",
}


def normalized_by_batch(model: nn.Module) -> list[_BatchNorm]:
    """Return those that train on the statistics of a batch."""
    return [layer for layer in model.modules() if layer.training and isinstance(layer, _BatchNorm)]
