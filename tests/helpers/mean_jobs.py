"""Define what ranks do in the tests of GlobalMean: each function runs on all ranks of a group.

An uneven round on the ranks is compared with one process that has all of its samples, in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from pyps.errors import InputError
from pyps.torch import GlobalMean, UnevenBatchSampler, uneven
from pyps.torch.compose import UnevenStep

SPLITS = {2: [3, 8], 3: [5, 2, 4], 4: [1, 4, 3, 3]}
ROWS, TOKENS, WIDTH, CLASSES = 11, 7, 6, 5
Loss = Callable[[torch.Tensor, slice], torch.Tensor]


def data() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=draws)
    labels[torch.rand(ROWS, TOKENS, generator=draws) < 0.35] = -100
    labels[torch.arange(3)] = labels[torch.arange(3)].masked_fill(
        torch.rand(3, TOKENS, generator=draws) < 0.5, -100
    )
    found = {
        "x": torch.randn(ROWS, TOKENS, WIDTH, generator=draws, dtype=torch.float64),
        "y": labels,
        "t": torch.randn(ROWS, TOKENS, CLASSES, generator=draws, dtype=torch.float64),
        "mask": torch.rand(ROWS, TOKENS, generator=draws) < 0.6,
        "w": torch.rand(CLASSES, generator=draws, dtype=torch.float64),
        "p": (torch.rand(ROWS, TOKENS, CLASSES, generator=draws) < 0.2).double(),
    }
    return {name: value.to(DEVICE) for name, value in found.items()}


D = data()


def ce(o: torch.Tensor, i: slice, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(o.flatten(0, 1), D["y"][i].flatten(), **options)


def per_token(o: torch.Tensor, i: slice) -> torch.Tensor:
    return (o - D["t"][i]).square().mean(-1)


LOSSES: dict[str, Loss] = {
    "ignore_index": ce,
    "class weights": lambda o, i: ce(o, i, weight=D["w"]),
    "label smoothing": lambda o, i: ce(o, i, label_smoothing=0.1),
    "a mask by product": lambda o, i: (per_token(o, i) * D["mask"][i]).sum() / D["mask"][i].sum(),
    "a mask by index": lambda o, i: (o - D["t"][i])[D["mask"][i]].square().mean(),
    "/ int(mask.sum())": lambda o, i: (per_token(o, i) * D["mask"][i]).sum() / int(D["mask"][i].sum()),
    "focal over positives": lambda o, i: (
        (
            functional.binary_cross_entropy_with_logits(o, D["p"][i], reduction="none")
            * (1 - o.sigmoid()) ** 2
        ).sum()
        / D["p"][i].sum()
    ),
    "two terms": lambda o, i: ce(o, i) / 4 - 2 * (per_token(o, i) * D["mask"][i]).sum() / D["mask"][i].sum(),
    "four losses of a detector": lambda o, i: (
        functional.binary_cross_entropy_with_logits(o[..., 0], D["mask"][i].double())
        + functional.smooth_l1_loss(o[..., 1:], D["t"][i][..., 1:], reduction="sum")
        / D["mask"][i].sum().clamp(min=1)
        + ce(o, i)
        + (functional.binary_cross_entropy_with_logits(o, D["p"][i], reduction="none")).sum()
        / D["p"][i].sum()
    ),
    "a mean of rows' means": lambda o, i: (
        (per_token(o, i) * D["mask"][i]).sum(1) / D["mask"][i].sum(1).clamp(1)
    ).mean(),
    "kl batchmean": lambda o, i: functional.kl_div(
        o.log_softmax(-1), D["t"][i].softmax(-1), reduction="batchmean"
    ),
}
CLAMPED: dict[str, Loss] = {
    "a mask by product, clamped": lambda o, i: (
        (per_token(o, i) * D["mask"][i]).sum() / D["mask"][i].sum().clamp(min=1)
    ),
    "a mask by index, clamped": lambda o, i: (
        per_token(o, i)[D["mask"][i]].sum() / max(1, int(D["mask"][i].sum()))
    ),
}
OF_SAMPLES: dict[str, tuple[Loss, str]] = {  # of one batch on [tokens, rows, classes], or of each row
    "sums over the samples": (lambda o, i: per_token(o, i).T.sum(1).mean(), "before"),
    "means over the samples": (lambda o, i: per_token(o, i).T.mean(1).sum() / TOKENS, "before"),
    "a sum over the time": (lambda o, i: per_token(o, i).T.sum() / TOKENS, "divided by 7 on all ranks"),
    "sums of each sample": (lambda o, i: per_token(o, i).sum(1).mean(), ""),
    "a sum over the samples' number": (lambda o, i: per_token(o, i).sum() / len(o), ""),
}
SUMS: dict[str, Loss] = {
    "a sum": lambda o, i: (o - D["t"][i]).square().sum(),
    "a sum over a constant": lambda o, i: (o - D["t"][i]).square().sum() / 11,
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "a root of a mean": (lambda o, i: functional.mse_loss(o, D["t"][i]).sqrt(), "SqrtBackward0"),
    "a bare sum": (SUMS["a sum"], "a sum that is divided by nothing"),
    "a constant on all ranks": (
        lambda o, i: (o - D["t"][i]).square().sum() / 999,
        "divided by 999 on all ranks",
    ),
    "a number of each rank": (lambda o, i: ce(o, i) * functional.mse_loss(o, D["t"][i]).detach(), "times"),
    "a maximum": (lambda o, i: (o - D["t"][i]).abs().max(), "MaxBackward1"),
}


class Net(nn.Module):
    """[rows, tokens, width] -> [rows, tokens, classes]; mode: how it computes that."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
        self.mode = mode

    def forward(self, x: Any, *more: torch.Tensor) -> torch.Tensor:
        if self.mode == "time first":
            return self.b(torch.tanh(self.a(x))).transpose(0, 1)
        if self.mode == "queries first":  # forward(queries, x): the first argument has no samples
            return self.b(torch.tanh(self.a(more[0])) + x.sum())
        if self.mode == "a list of images":
            x = torch.stack(x)
        if self.mode == "checkpoint":
            return self.b(checkpoint(lambda q: torch.tanh(self.a(q)), x, use_reentrant=False))
        return self.b(torch.tanh(self.a(x)))


def inputs(mode: str, rows: slice) -> tuple[Any, ...]:
    x = D["x"][rows]
    if mode == "time first":
        return (x.transpose(0, 1),)
    if mode == "queries first":
        return (torch.ones(4, 3, dtype=torch.float64, device=DEVICE), x)
    return (list(x),) if mode == "a list of images" else (x,)


def own_rows(group: dist.ProcessGroup, split: list[int] | None = None) -> slice:
    split = split or SPLITS[group.size()]
    first = sum(split[: group.rank()])
    return slice(first, first + split[group.rank()])


def sharded(model: nn.Module, group: dist.ProcessGroup) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, DEVICE.type)
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    return model


def hybrid(model: nn.Module, group: dist.ProcessGroup) -> Any:
    """Shards over two ranks each, which others have, too: HSDP."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(2, 2)
    mesh = DeviceMesh(DEVICE.type, ranks, mesh_dim_names=("replicas", "shards"))
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module, dist.ProcessGroup], Any]] = {
    "ddp": lambda m, g: DistributedDataParallel(m, process_group=g),
    "static graph": lambda m, g: DistributedDataParallel(m, process_group=g, static_graph=True),
    "unused parameters": lambda m, g: DistributedDataParallel(
        m, process_group=g, find_unused_parameters=True
    ),
    "bucket views": lambda m, g: DistributedDataParallel(m, process_group=g, gradient_as_bucket_view=True),
    "compiled": lambda m, g: DistributedDataParallel(torch.compile(m, backend="aot_eager"), process_group=g),
    "fsdp": sharded,
    "hsdp": hybrid,
}


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def apart(alone: nn.Module, model: nn.Module, scale: float = 1.0) -> float:
    """The worst relative difference of two models' gradients."""
    inner = getattr(model, "module", model)
    inner = getattr(inner, "_orig_mod", inner)
    return max(
        float((p.grad * scale - whole(q.grad)).norm() / (p.grad * scale).norm())
        for p, q in zip(alone.parameters(), inner.parameters(), strict=True)
        if p.grad is not None
    )


def losses(group: dist.ProcessGroup, names: list[str], wrapper: str = "ddp") -> dict[str, float]:
    """Return how far each loss's gradient is from one process's; and the loss itself, where it is known."""
    found = {}
    for name in names:
        loss = {**LOSSES, **SUMS}[name]
        alone, model = Net(), WRAPPERS[wrapper](Net(), group)
        mean = GlobalMean(model, reduction="sum" if name in SUMS else "mean")
        right = loss(alone(D["x"]), slice(0, ROWS))
        right.backward()
        rows = own_rows(group)
        mean.backward(loss(model(D["x"][rows]), rows))
        found[name] = apart(alone, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (value := mean.loss) is not None:
                found[name] = max(found[name], abs(float(value / right) - 1))
    return found


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    rows, found = own_rows(group), {}
    for name, (loss, _) in REFUSED.items():
        model = WRAPPERS["ddp"](Net(), group)
        found[name] = said(lambda: GlobalMean(model).backward(loss(model(D["x"][rows]), rows)))  # noqa: B023
    return found


def moved(group: dist.ProcessGroup, mode: str) -> list[tuple[int, float]]:
    """Return of each step of uneven() this rank's samples, and how far the gradient is off; after the first
    step the split moves.
    """

    def collated(rows: list[int]) -> tuple[torch.Tensor, Any]:
        picked = torch.tensor(rows) % ROWS
        x = D["x"][picked]
        return picked, x.transpose(0, 1) if mode == "time first" else list(x)

    net = Net(mode)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data: Any = range(4 * ROWS)
    model, loader, step = uneven(net, data, 12, optimizer=optimizer, collate_fn=collated)
    found, loss = [], LOSSES["two terms"]
    for rows, x in loader:
        optimizer.zero_grad()
        step.backward(loss(model(x), rows))
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, rows, group=group)
        alone, whole_round = Net(mode), torch.cat(every)
        alone.load_state_dict(net.state_dict())
        inputs = collated(whole_round.tolist())[1]
        loss(alone(inputs), whole_round).backward()
        found.append((len(rows), apart(alone, model)))
        if len(found) == 1:
            step.sampler.replan([6, 1, 3, 2])
        step()
    return found


def of_samples(group: dist.ProcessGroup) -> dict[str, tuple[float, str]]:
    """Return of losses that reduce dimensions one by one how far each is off, or what refused it."""
    rows, found = own_rows(group), {}
    for name, (loss, _) in OF_SAMPLES.items():
        alone, model = Net(), WRAPPERS["ddp"](Net(), group)
        sampler = UnevenBatchSampler(ROWS, SPLITS[group.size()], group.rank(), shuffle=False)
        reading = iter(DataLoader(range(ROWS), batch_sampler=sampler))  # type: ignore[arg-type]
        next(reading)
        loss(alone(D["x"]), slice(0, ROWS)).backward()
        mean, o = GlobalMean(model, sampler), model(D["x"][rows])
        heard = said(lambda: mean.backward(loss(o, rows)))  # noqa: B023
        found[name] = (apart(alone, model) if heard == "nothing" else 0.0), heard
    return found


def per_sample(group: dist.ProcessGroup, how: str) -> str:
    """Return what all ranks hear of a loss of each sample, over targets of unlike numbers."""
    rows = slice(3 * group.rank(), 3 * group.rank() + 3)
    model = WRAPPERS["ddp"](Net(), group)
    mean, o = GlobalMean(model), model(D["x"][rows])
    each = [functional.cross_entropy(one, y) for one, y in zip(o, D["y"][rows], strict=True)]
    loss = torch.stack(each).mean() if how == "stack" else sum(each, torch.zeros(())) / len(each)
    if how != "n=":
        return said(lambda: mean.backward(loss))
    mean.backward(loss, n=len(each))
    alone, every = Net(), slice(0, 3 * group.size())
    o = alone(D["x"][every])
    right = [functional.cross_entropy(one, y) for one, y in zip(o, D["y"][every], strict=True)]
    torch.stack(right).mean().backward()  # type: ignore[no-untyped-call]
    return str(apart(alone, model))


def focal_without_positives(group: dist.ProcessGroup) -> str:
    """Return what all ranks hear where one has no positives, which its graph does not show."""
    rows, model = own_rows(group), WRAPPERS["ddp"](Net(), group)
    loss = model(D["x"][rows]).square().sum() / (1 if group.rank() == 0 else 5)
    return said(lambda: GlobalMean(model).backward(loss))


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing"


def modes(group: dist.ProcessGroup, names: list[str]) -> dict[str, float]:
    """Ways to compute: of inputs, of wrappers, with micro-batches."""
    found, rows = {}, own_rows(group)
    for name in names:
        mode = name if name not in WRAPPERS else ""
        alone, model = Net(mode), WRAPPERS.get(name, WRAPPERS["ddp"])(Net(mode), group)
        mean = GlobalMean(model)
        LOSSES["two terms"](alone(*inputs(mode, slice(0, ROWS))), slice(0, ROWS)).backward()
        mean.backward(LOSSES["two terms"](model(*inputs(mode, rows)), rows))
        found[name] = apart(alone, model)
    return found


def micro_batches(group: dist.ProcessGroup, wrapper: str, name: str, alike: bool) -> dict[str, float]:
    """Two rounds in micro-batches of unlike sizes, and unless alike of unlike numbers; gradients add up."""
    loss, rows = LOSSES[name], own_rows(group)
    alone, model = Net(), WRAPPERS[wrapper](Net(), group)
    mean, found = GlobalMean(model), {}
    right = loss(alone(D["x"]), slice(0, ROWS))
    right.backward()
    own = [1, rows.stop - rows.start - 1] if alike or group.rank() else [rows.stop - rows.start]
    for _ in range(2):
        first = rows.start
        for k, size in enumerate(own):
            micro = slice(first, first + size)
            first += size
            last = k == len(own) - 1
            with mean.models[0].micro_batch(last, whole=not alike):
                mean.backward(loss(model(D["x"][micro]), micro))
        mean.end_step()
    assert mean.loss is not None
    found["loss"] = abs(float(mean.loss / right) - 1)
    found["gradient"] = apart(alone, model, 2.0)  # of two rounds
    return found


def without_targets(group: dist.ProcessGroup) -> dict[str, float]:
    """Rank 0 has no target: its own loss is NaN."""
    found, rows = {}, own_rows(group)
    before = D["y"].clone(), D["mask"].clone(), D["p"].clone()
    first = SPLITS[group.size()][0]
    try:
        D["y"][:first], D["mask"][:first], D["p"][:first] = -100, False, 0
        names = [
            "ignore_index",
            "class weights",
            "a mask by product",
            "a mask by index",
            "focal over positives",
        ]
        found = losses(group, names)
        model, alone = WRAPPERS["ddp"](Net(), group), Net()
        mean = GlobalMean(model)
        ce(alone(D["x"]), slice(0, ROWS)).backward()
        targets = (D["y"][rows] != -100).sum()
        mean.backward(ce(model(D["x"][rows]), rows), n=targets)
        found["n="] = apart(alone, model)
        LOSSES.update(CLAMPED)
        found |= losses(group, list(CLAMPED))
        D["mask"][1] = True  # more than one, and then a single one on the first rank
        found |= {f"{name}, of some": far for name, far in losses(group, list(CLAMPED)).items()}
    finally:
        D["y"], D["mask"], D["p"] = before
    return found


PENALTIES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "squares": lambda m: sum(
        (p.square().sum() for p in m.parameters()), torch.zeros((), dtype=torch.float64)
    ),
    "norms": lambda m: torch.stack([p.norm() for p in m.parameters()]).mean(),
    "orthogonality": lambda m: (m.b.weight @ m.b.weight.T).square().sum().sqrt(),
}


def penalties(group: dist.ProcessGroup) -> dict[str, float]:
    """Penalties on weights count once; one on the gradient of inputs is of data."""
    found, rows = {}, own_rows(group)
    for name, penalty in PENALTIES.items():
        alone, model = Net(), WRAPPERS["ddp"](Net(), group)
        (ce(alone(D["x"]), slice(0, ROWS)) + 0.01 * penalty(alone)).backward()
        GlobalMean(model).backward(ce(model(D["x"][rows]), rows) + 0.01 * penalty(model.module))
        found[name] = apart(alone, model)

    def penalised(of: nn.Module, i: slice) -> torch.Tensor:
        x = D["x"][i].clone().requires_grad_()
        o = of(x)
        (slope,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        return ce(o, i) + (slope.flatten(1).norm(dim=1) - 1).square().mean()

    alone, model = Net(), WRAPPERS["ddp"](Net(), group)
    penalised(alone, slice(0, ROWS)).backward()
    GlobalMean(model).backward(penalised(model, rows))
    return found | {"of inputs": apart(alone, model)}


def scaled(group: dist.ProcessGroup, unlike: bool) -> Any:
    """A GradScaler; unlike: bf16 without one on the first rank, f16 with one on the others."""
    rows, alone, model = own_rows(group), Net(), WRAPPERS["ddp"](Net(), group)
    with_scaler = not unlike or group.rank() > 0
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0) if with_scaler else None
    mean = GlobalMean(model, scaler=None if unlike else scaler)
    ce(alone(D["x"]), slice(0, ROWS)).backward()
    kind = torch.float16 if with_scaler else torch.bfloat16
    with torch.autocast(DEVICE.type, kind) if unlike else nullcontext():
        loss = ce(model(D["x"][rows]), rows)
    if unlike:
        return said(lambda: mean.backward(scaler.scale(loss) if scaler else loss))
    assert scaler is not None
    mean.backward(scaler.scale(loss))
    right = float(ce(alone(D["x"]), slice(0, ROWS)))
    assert mean.loss is not None
    return max(apart(alone, model, 1024.0), abs(float(mean.loss) / right - 1))


def precisions(group: dist.ProcessGroup, what: str) -> Any:
    """Compute in bf16, f16 and f32, one on each rank: how far the gradient is off one process's in f32.

    what: "compute", or "loss" for losses of these types, too, which are refused.
    """
    rows, kind = own_rows(group), (torch.bfloat16, torch.float16, torch.float32)[group.rank()]
    model = WRAPPERS["ddp"](Net().float(), group)
    mean = GlobalMean(model, timeout=3.0)
    x, t = D["x"].float(), D["t"].float()
    with torch.autocast(DEVICE.type, kind, enabled=kind != torch.float32):
        out = model(x[rows])
    loss = (out.float() - t[rows]).square().mean()
    if what == "loss":
        return said(lambda: mean.backward(loss.to(kind)))
    mean.backward(loss)
    alone = Net().float()
    (alone(x) - t).square().mean().backward()
    return apart(alone, model)


def unlike_rule(group: dist.ProcessGroup, field: str) -> str:
    """Return what all ranks hear of uneven() where the first one's optimizer has another constant."""
    model, kept = WRAPPERS["ddp"](Net(), group), {"lr": 0.1, "weight_decay": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), **kept | ({field: 0.5} if group.rank() == 0 else {}))
    mean = GlobalMean(model)
    UnevenStep(model, optimizer, None, mean, None)  # type: ignore[arg-type]
    rows = own_rows(group)
    return said(lambda: mean.backward(ce(model(D["x"][rows]), rows)))


def unlike(group: dist.ProcessGroup, what: str) -> str:
    """Return what all ranks hear where one does something else."""
    odd, rows = group.rank() == 0, own_rows(group)
    model = WRAPPERS["ddp"](Net(), group)
    if what == "wire=":
        mean = GlobalMean(model, wire="bf16" if odd else "same")
    elif what == "an option that is unknown":
        return said(lambda: GlobalMean(model, wire="bf8" if odd else "same"))  # type: ignore[arg-type]
    else:
        mean = GlobalMean(model, timeout=3.0)
    if what == "a frozen layer" and odd:
        model.module.a.requires_grad_(False)
    loss = ce(model(D["x"][rows]), rows)
    if what == "another kind of loss" and odd:
        loss = loss + functional.mse_loss(model(D["x"][rows]), D["t"][rows])
    if what == "a loss that is unknown" and odd:
        loss = loss.sqrt()
    if what == "another dtype" and odd:
        loss = loss.float()
    if what == "fewer calls" and odd:
        import time

        time.sleep(6)
        return "nothing"
    return said(lambda: mean.backward(loss))


def misuse(group: dist.ProcessGroup, what: str) -> str:
    """Return what all ranks hear of what cannot be weighed."""
    rows, net = own_rows(group), Net()
    if what == "unfrozen":
        net.a.requires_grad_(False)
    model = WRAPPERS["ddp"](net, group)
    mean = GlobalMean(model)
    if what == "unfrozen":
        net.a.requires_grad_(True)
    if what == "added":
        net.c = nn.Linear(2, 2).double()
    if what == "optimizer in backward":
        net.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    with ExitStack() as stack:
        if what == "join":
            stack.enter_context(model.join())
        loss = ce(model(D["x"][rows]), rows)
        if what == "plain":
            return said(loss.backward)
        if what == "another model":
            other = nn.Linear(CLASSES, 1).double()
            loss = loss + other(model(D["x"][rows])).square().mean()
        if what == "divided micro-batches":
            with model.no_sync():
                mean.backward(ce(model(D["x"][rows]), rows) / 2)
            return said(lambda: mean.backward(ce(model(D["x"][rows]), rows) / 2))
        if what == "step without a reduction":
            with model.no_sync():
                mean.backward(ce(model(D["x"][rows]), rows))
            return said(mean.end_step)
        return said(lambda: mean.backward(loss))


def two_models(group: dist.ProcessGroup) -> float:
    """One loss through two models."""
    rows, first, second = own_rows(group), Net(), nn.Linear(CLASSES, CLASSES).double()
    alone = copy.deepcopy(first), copy.deepcopy(second)
    models = [
        DistributedDataParallel(first, process_group=group),
        DistributedDataParallel(second, process_group=group),
    ]
    LOSSES["two terms"](alone[1](alone[0](D["x"])), slice(0, ROWS)).backward()
    mean = GlobalMean(models)
    mean.backward(LOSSES["two terms"](models[1](models[0](D["x"][rows])), rows))
    return max(apart(one, model) for one, model in zip(alone, models, strict=True))
