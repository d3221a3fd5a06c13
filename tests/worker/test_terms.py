"""A loss's own graph says what it is a mean over: its parts add up to the whole, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.modules import loss as torchs

from pyps.errors import InputError
from pyps.worker.step.terms import Term, terms_of

EXACT = 1e-13
ROWS, CLASSES = 11, 5
PARTS = (slice(0, 3), slice(3, ROWS))
Loss = Callable[[nn.Module, slice], torch.Tensor]

draws = torch.Generator().manual_seed(1)
X = torch.randn(ROWS, 6, generator=draws, dtype=torch.float64)
T = torch.randn(ROWS, CLASSES, generator=draws, dtype=torch.float64)
Y = torch.randint(0, CLASSES, (ROWS,), generator=draws)
Y[torch.tensor([1, 5, 6])] = -100
KNOWN = Y.clamp(min=0)
M = torch.rand(ROWS, generator=draws) < 0.6
M[0], M[1] = True, False
W = torch.rand(CLASSES, generator=draws, dtype=torch.float64)
P = (torch.rand(ROWS, CLASSES, generator=draws) < 0.3).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, CLASSES).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return found


def gradient(net: nn.Module) -> torch.Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in net.parameters()]
    )


def weighed(loss_of: Loss, parts: tuple[slice, ...] = PARTS) -> torch.Tensor:
    """The gradients of all parts, each let in at each term times n / W. Raises InputError."""
    found: list[tuple[nn.Module, torch.Tensor, list[Term]]] = []
    for part in parts:
        net = Net()
        loss = loss_of(net, part)
        found.append((net, loss, terms_of(loss)))
    rows = [
        [(t.kind, t.is_mean, t.count is None, round(t.constant, 9)) for t in terms] for _, _, terms in found
    ]
    if rows[0] != rows[1]:
        raise InputError("terms", "rows", str(rows), "alike")
    total = torch.zeros(())
    for net, loss, terms in found:
        for k, term in enumerate(terms):
            counts = [float(other[k].count) for _, _, other in found if other[k].count is not None]
            if not counts:
                raise InputError("terms", "sum", term.kind, "a divisor")
            if not term.is_mean and len(set(counts)) == 1 and not any(o[k].counts_own() for _, _, o in found):
                raise InputError("terms", "sum", f"{counts} for all", "a count")
            share = float(term.count) / sum(counts)  # type: ignore[arg-type]
            term.node.register_prehook(_times(share))
        if not terms:
            loss = loss / len(found)
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + gradient(net)
    return total


def _times(share: float) -> Callable[[Any], Any]:
    return lambda given: tuple(
        None if g is None else g * share if share else torch.zeros_like(g) for g in given
    )


def off(loss_of: Loss, parts: tuple[slice, ...] = PARTS, penalty: Loss | None = None) -> float:
    """How far the weighed parts are from the whole; a penalty comes once with each part."""
    whole = Net()
    loss_of(whole, slice(0, ROWS)).backward()  # type: ignore[no-untyped-call]
    right, found = gradient(whole), weighed(loss_of, parts)
    if penalty is not None:
        once = Net()
        penalty(once, slice(0, 0)).backward()  # type: ignore[no-untyped-call]
        found = found - (len(parts) - 1) * gradient(once)
    return float((found - right).norm() / right.norm())


def is_exact(loss_of: Loss, parts: tuple[slice, ...] = PARTS) -> bool:
    """Tell whether it is exact; False where it is refused. Anything else fails."""
    try:
        error = off(loss_of, parts)
    except InputError:
        return False
    assert error < EXACT
    return True


def of_torch(kind: Any, reduction: str, **options: Any) -> Loss:
    """One of torch's own losses, with the inputs that it asks for."""
    name = kind.__name__

    def loss(net: nn.Module, i: slice) -> torch.Tensor:
        if name == "LinearCrossEntropyLoss":
            torch.manual_seed(0)
            head = kind(CLASSES, 4, reduction=reduction, **options).double()
            return head(net(X[i]), KNOWN[i] % 4)  # type: ignore[no-any-return]
        judge, o = kind(reduction=reduction, **options), net(X[i])
        two = o * 1.5 - 0.2
        given: tuple[torch.Tensor, ...] = (o, T[i])
        if name in ("NLLLoss", "NLLLoss2d"):
            given = (o.log_softmax(1), Y[i])
            if name == "NLLLoss2d":
                given = (o.log_softmax(1)[:, :, None, None], Y[i][:, None, None])
        elif name in ("CrossEntropyLoss", "MultiMarginLoss"):
            given = (o, Y[i] if name == "CrossEntropyLoss" else KNOWN[i])
        elif name == "PoissonNLLLoss":
            given = (o, T[i].exp())
        elif name == "GaussianNLLLoss":
            given = (o, T[i], o.exp())
        elif name == "KLDivLoss":
            given = (o.log_softmax(1), T[i].softmax(1))
        elif name in ("BCELoss", "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss"):
            given = (o.sigmoid() if name == "BCELoss" else o, P[i])
        elif name in ("HingeEmbeddingLoss", "SoftMarginLoss"):
            given = (o, T[i].sign())
        elif name == "MultiLabelMarginLoss":
            given = (o, torch.where(P[i].bool(), torch.arange(CLASSES), -1).sort(1, descending=True).values)
        elif name == "CosineEmbeddingLoss":
            given = (o, T[i], P[i][:, 0] * 2 - 1)
        elif name == "MarginRankingLoss":
            given = (o, two, T[i].sign())
        elif name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss"):
            given = (o, T[i], two)
        elif name == "CTCLoss":
            logits = o[:, None, :].expand(-1, 4, -1).transpose(0, 1).log_softmax(2)
            rows = len(o)
            targets = KNOWN[i][:, None].expand(rows, 2) % 4 + 1
            given = (logits, targets, torch.full((rows,), 4), KNOWN[i] % 2 + 1)
        return judge(*given)  # type: ignore[no-any-return]

    return loss


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "CrossEntropyLoss": [{"weight": W}, {"label_smoothing": 0.1}, {"weight": W, "label_smoothing": 0.1}],
    "NLLLoss": [{"weight": W}],
    "BCELoss": [{"weight": W}],
    "BCEWithLogitsLoss": [{"pos_weight": W}, {"weight": W}],
    "MultiMarginLoss": [{"weight": W}, {"p": 2}],
    "MultiLabelSoftMarginLoss": [{"weight": W}],
    "TripletMarginLoss": [{"swap": True}],
    "CTCLoss": [{"zero_infinity": True}],
    "PoissonNLLLoss": [{"full": True}],
}
CASES = [
    (name, reduction, options)
    for name in torchs.__all__
    for reduction in ("mean", "sum", *(("batchmean",) if name == "KLDivLoss" else ()))
    for options in ({}, *OPTIONS.get(name, []))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "reduction", "options"), CASES)
def test_each_of_torch_s_losses_is_exact_or_refused(
    name: str, reduction: str, options: dict[str, Any]
) -> None:
    loss = of_torch(getattr(torchs, name), reduction, **options)
    try:
        terms = terms_of(loss(Net(), PARTS[0]))
    except InputError as refused:
        pytest.fail(f"{name} is not known: {refused}")
    if reduction == "sum":
        assert all(not term.is_mean for term in terms)
        assert not is_exact(loss)  # divided by nothing: what it is a sum of is the script's to say
        return
    assert is_exact(loss)
    halves = (slice(0, 5), slice(5, 10))  # equal parts: no divisor may be taken for a constant
    equal = [terms_of(loss(Net(), part)) for part in halves]
    for first, second in zip(*equal, strict=True):
        assert first.is_mean or first.counts_own() or second.counts_own()


def per_row(net: nn.Module, i: slice) -> torch.Tensor:
    found: torch.Tensor = (net(X[i]) - T[i]).square().mean(-1)
    return found


def ce(net: nn.Module, i: slice, **options: Any) -> torch.Tensor:
    return F.cross_entropy(net(X[i]), Y[i], **options)


def focal(net: nn.Module, i: slice) -> torch.Tensor:
    o = net(X[i])
    each = F.binary_cross_entropy_with_logits(o, P[i], reduction="none") * (1 - o.sigmoid()) ** 2
    return each.sum() / P[i].sum()


KNOWN_LOSSES: dict[str, Loss] = {
    "sum / tokens": lambda net, i: ce(net, i, reduction="sum") / (Y[i] != -100).sum(),
    "a mask by product": lambda net, i: (per_row(net, i) * M[i]).sum() / M[i].sum(),
    "a mask by index": lambda net, i: (net(X[i]) - T[i])[M[i]].square().mean(),
    "/ int(mask.sum())": lambda net, i: (per_row(net, i) * M[i]).sum() / int(M[i].sum()),
    "* (1 / n)": lambda net, i: (per_row(net, i) * M[i]).sum() * (1 / M[i].sum().double()),
    "a dot product": lambda net, i: per_row(net, i) @ M[i].double() / M[i].sum(),
    "focal": focal,
    "nanmean": lambda net, i: torch.where(M[i][:, None], net(X[i]), torch.nan).nanmean(),
    "two terms": lambda net, i: ce(net, i) / 4 - 2 * (per_row(net, i) * M[i]).sum() / M[i].sum(),
    "a list of losses": lambda net, i: sum([ce(net, i), F.mse_loss(net(X[i]), T[i])]) / 2,  # type: ignore[return-value]
    "a weighted stack": lambda net, i: (
        torch.stack([ce(net, i), F.mse_loss(net(X[i]), T[i])]) * torch.tensor([0.3, 2.0])
    ).sum(),
    "a stack's mean": lambda net, i: torch.stack([ce(net, i), F.mse_loss(net(X[i]), T[i])]).mean(),
    "casts": lambda net, i: F.cross_entropy(net(X[i]).float().double(), Y[i]),
    "a loss used twice": lambda net, i: (lambda one: one + 0.5 * one)(ce(net, i)),
    "means of means": lambda net, i: (net(X[i]) - T[i]).square().mean(1).mean(),
    "means of sums": lambda net, i: (net(X[i]) - T[i]).square().sum(1).mean(),
    "a learned number": lambda net, i: (-net.scale).exp() * ce(net, i) + net.scale,  # type: ignore[operator]
    "started from zeros": lambda net, i: torch.zeros(1, dtype=torch.float64) + ce(net, i),
    "times 0": lambda net, i: ce(net, i) + 0 * net(X[i]).sum(),
}
REFUSED: dict[str, Loss] = {
    "a root": lambda net, i: F.mse_loss(net(X[i]), T[i]).sqrt(),
    "a logarithm": lambda net, i: per_row(net, i).mean().log(),
    "a maximum": lambda net, i: torch.maximum(ce(net, i), per_row(net, i).mean()),
    "a bare sum": lambda net, i: per_row(net, i).sum(),
    "a sum over samples, then a mean": lambda net, i: net(X[i]).square().sum(0).mean(),
    "a mean over samples, then a sum": lambda net, i: net(X[i]).square().mean(0).sum(),
    "a variance over samples": lambda net, i: net(X[i]).var(0).mean(),
    "a number over a loss": lambda net, i: 1 / ce(net, i),
    "a product of losses": lambda net, i: ce(net, i) * per_row(net, i).mean(),
    "a penalty on the rows that were used": lambda net, i: ce(net, i) + net.b.weight[KNOWN[i]].square().sum(),  # type: ignore[index,operator,union-attr]
    "unlike ways to one sum": lambda net, i: (lambda one: one / len(X[i]) + one)(per_row(net, i).sum()),
}


@pytest.mark.parametrize("name", KNOWN_LOSSES)
def test_what_is_linear_is_exact(name: str) -> None:
    loss = KNOWN_LOSSES[name]
    if name == "a learned number":  # the number's own term is a penalty, which comes with each part
        assert off(loss, penalty=lambda net, _: net.scale * 1.0) < EXACT  # type: ignore[operator,return-value]
    else:
        assert is_exact(loss)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    assert not is_exact(REFUSED[name])


PENALTIES: dict[str, Loss] = {
    "squares": lambda net, _: 0.01 * sum(p.square().sum() for p in net.parameters()),  # type: ignore[return-value]
    "magnitudes": lambda net, _: 0.01 * sum(p.abs().sum() for p in net.parameters()),  # type: ignore[return-value]
    "norms": lambda net, _: 0.1 * sum(p.norm() ** 2 for p in net.a.parameters()),  # type: ignore[union-attr,return-value]
    "orthogonality": lambda net, _: (net.a.weight.T @ net.a.weight - torch.eye(6)).square().sum(),  # type: ignore[union-attr,operator,return-value]
    "groups": lambda net, _: net.a.weight.square().sum(1).sqrt().sum(),  # type: ignore[union-attr,operator,return-value]
    "a mean": lambda net, _: net.a.weight.square().mean(),  # type: ignore[union-attr,operator,return-value]
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_weights_is_no_term(name: str) -> None:
    penalty = PENALTIES[name]
    assert terms_of(penalty(Net(), slice(0, 0))) == []
    assert off(lambda net, i: ce(net, i) + penalty(net, i), penalty=penalty) < EXACT


def test_a_penalty_on_the_inputs_gradient_is_data() -> None:
    def loss(net: nn.Module, i: slice) -> torch.Tensor:
        x = X[i].clone().requires_grad_()
        o = net(x)
        (slope,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        return F.mse_loss(o, T[i]) + (slope.norm(dim=1) - 1).square().mean()

    assert is_exact(loss)


def test_a_part_without_targets_weighs_nothing() -> None:
    targets = Y.clone()
    targets[:3] = -100
    assert is_exact(lambda net, i: F.cross_entropy(net(X[i]), targets[i]))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(3, requires_grad=True) * 2, "shape \\(3,\\)"),
        (torch.ones((), requires_grad=True), "a leaf"),
        (torch.ones(()), "a tensor without a gradient"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, "complex64"),
        (torch.ones(4, requires_grad=True).prod() * 2, "ProdBackward0; expected .*n=count"),
    ],
)
def test_what_is_no_loss_is_named(loss: torch.Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        terms_of(loss)
