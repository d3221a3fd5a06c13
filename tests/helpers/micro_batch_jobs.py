"""Jobs of ranks that compute their batch in passes: every loss, in any parts, left loops, divided losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mean_jobs import LOSSES, PENALTIES, ROWS, SPLITS, SUMS, WRAPPERS, D, Net, apart, ce, own_rows, said

from pyps.errors import InputError
from pyps.torch import GlobalMean

Parts = int | Sequence[int]
HALF: dict[str, Callable[[torch.Tensor, slice], torch.Tensor]] = {
    "half of a loss": lambda o, i: ce(o, i) * 0.5,
    "no item on any rank": lambda o, i: (o * 0.0).sum() / torch.zeros(()).clamp(min=1),
}


def in_parts(group: dist.ProcessGroup, wrapper: str, parts: Parts, penalized: bool) -> dict[str, float | str]:
    """Compare the gradient of each loss, and the loss, with one process's; or return what all ranks hear.

    penalized: a penalty on weights is added.
    """
    found: dict[str, float | str] = {}
    for name, loss in {**LOSSES, **SUMS, **HALF}.items():
        alone, model = Net(), WRAPPERS[wrapper](Net(), group)

        def of(net: Any, inner: Any, i: Any, loss: Any = loss) -> torch.Tensor:
            penalty = 0.1 * PENALTIES["squares"](inner) if penalized else 0.0
            value: torch.Tensor = loss(net(D["x"][i]), i) + penalty
            return value

        right = of(alone, alone, slice(0, ROWS))
        right.backward()
        mean = GlobalMean(model, reduction="sum" if name in SUMS else "mean")
        rows = torch.arange(ROWS)[own_rows(group)]
        try:
            for (micro,) in mean.accumulate((rows,), parts):
                mean.backward(of(model, getattr(model, "module", model), micro))
        except InputError as error:
            found[name] = str(error)
            continue
        found[name] = apart(alone, model) if penalized or right != 0 else 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (value := mean.loss) is not None and not penalized and right != 0:
                found[name] = max(apart(alone, model), abs(float(value / right) - 1))
    return found


def of_one_rank(group: dist.ProcessGroup) -> dict[str, float]:
    """The first rank's samples alone count: the others' pass repeats what is counted elsewhere."""
    found = {}
    rows, first = own_rows(group), slice(0, SPLITS[group.size()][0])
    for name, loss in {**LOSSES, **SUMS}.items():
        alone, model = Net(), WRAPPERS["ddp"](Net(), group)
        loss(alone(D["x"][first]), first).backward()
        mean = GlobalMean(model, reduction="sum" if name in SUMS else "mean")
        mean.repeats(group.rank() > 0)
        mean.backward(loss(model(D["x"][rows]), rows))
        found[name] = apart(alone, model)
    return found


def left(group: dist.ProcessGroup, how: str, wrapper: str, parts: Parts) -> float:
    """A loop over so many micro-batches that is left at its second one; then the whole batch in others.

    how: whether by an error that something still refers to, or a break; "kept": gradients are not zeroed.
    """
    rows = torch.arange(ROWS)[own_rows(group)]
    alone, model = Net(), WRAPPERS[wrapper](Net(), group)
    ce(alone(D["x"]), slice(0, ROWS)).backward()
    mean, kept = GlobalMean(model), []
    before = 1.0 if how == "kept" else 0.0
    if how == "kept":
        mean.backward(ce(model(D["x"][rows]), rows))  # type: ignore[arg-type]

    def begin() -> None:
        for k, (micro,) in enumerate(mean.accumulate((rows,), parts)):
            if k == 1:
                if how == "error":
                    raise MemoryError
                break
            mean.backward(ce(model(D["x"][micro]), micro))

    try:
        begin()
    except MemoryError as error:
        kept.append(error)
    if how != "kept":
        model.zero_grad()
    if how in ("no_sync", "zeroed"):
        with model.no_sync():
            mean.backward(ce(model(D["x"][rows[:1]]), rows[:1]))  # type: ignore[arg-type]
        model.zero_grad(set_to_none=how == "no_sync")
    for (micro,) in mean.accumulate((rows,), [2, 5]):
        mean.backward(ce(model(D["x"][micro]), micro))
    mean.end_step()
    return apart(alone, model, 1.0 + before)


def on_the_wire(group: dist.ProcessGroup, wire: Any, every: Sequence[int]) -> float:
    """The worst relative error of a step's gradient coded for the link. every: the parts of each step."""
    rows = torch.arange(ROWS)[own_rows(group)]
    alone, model = Net(), WRAPPERS["ddp"](Net(), group)
    ce(alone(D["x"]), slice(0, ROWS)).backward()
    mean, worst = GlobalMean(model, wire=wire), 0.0
    for parts in every:
        model.zero_grad()
        for (micro,) in mean.accumulate((rows,), parts):
            mean.backward(ce(model(D["x"][micro]), micro))
        worst = max(worst, apart(alone, model))
    return worst


def divided(group: dist.ProcessGroup, what: str) -> str:
    """Return what all ranks hear of two micro-batches whose loss is divided by their number."""
    rows, model = torch.arange(ROWS)[own_rows(group)], WRAPPERS["ddp"](Net(), group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mean = GlobalMean(model, scaler=scaler if what == "scaled" else None)
    parts = [2, 1] if what == "a constant" else [2, 2]

    def losses(i: Any) -> torch.Tensor:
        o = model(D["x"][i])
        if what == "a constant":
            return (o - D["t"][i]).square().sum() / 999
        loss = LOSSES["a mask by product" if what == "a sum" else "ignore_index"](o, i)
        return scaler.scale(loss / 2) if what == "scaled" else loss / 2  # type: ignore[no-any-return]

    def loop() -> None:
        for (micro,) in mean.accumulate((rows,), parts):
            if what == "n=":
                mean.backward(losses(micro), n=len(micro))
            elif what == "two losses":
                for _ in range(2):
                    mean.backward(ce(model(D["x"][micro]), micro))
            else:
                mean.backward(losses(micro))

    return said(loop)
