"""Define the jobs of the tests of sharding: each function runs on all ranks of a group.

A run on ranks with uneven batches and shares is compared with one process that has all samples, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, numbers, off
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyps.torch
from pyps.errors import InputError
from pyps.torch import GlobalMean

BATCHES = {2: [8, 4], 3: [7, 4, 1], 4: [5, 4, 2, 1]}
STEPS, ROWS = 20, 12


class Net(nn.Module):
    """[n, 8] -> [n, 4], in blocks; kind: what is unusual about it."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first = nn.Linear(8, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(9, 4)
        self.norm = nn.LayerNorm(9)
        if kind == "tied":
            self.blocks[2][0].weight = self.blocks[0][0].weight
            self.down = nn.Linear(9, 8, bias=False)
            self.down.weight = nn.Parameter(self.first.weight.detach().clone().T.contiguous())
            self.first.weight = nn.Parameter(self.down.weight.detach().T.contiguous())
        if kind == "unused":
            self.unused = nn.Linear(3, 3)
        if kind == "frozen":
            self.blocks[1].requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without, by their names."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    is_vector = {name: name.endswith("bias") or "norm" in name for name, _ in named}
    return [
        {"params": [p for name, p in named if not is_vector[name]], "weight_decay": 0.1},
        {"params": [p for name, p in named if is_vector[name]], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), amsgrad=True, foreach=False
    ),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def one_process(kind: str, optimizer: str, steps: int = STEPS) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Train with all samples in this process: the parameters and the optimizer."""
    model = Net(kind)
    one = OPTIMIZERS[optimizer](groups(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one, STEPS)
    for step in range(steps):
        x, y = numbers(step, ROWS, torch.float64)
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        one.zero_grad()
        schedule.step()
    return flat(model.parameters()), one


def batch(step: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = numbers(step, ROWS, torch.float64)
    rows = mine(BATCHES[group.size()], group)
    return x[rows], y[rows]


def in_ddp(model: nn.Module, group: dist.ProcessGroup, kind: str = "plain") -> DistributedDataParallel:
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=1, find_unused_parameters=kind == "unused"
    )


def optimizer_steps(
    group: dist.ProcessGroup, shares: list[float], kind: str = "plain", optimizer: str = "AdamW"
) -> dict[str, float]:
    """Return how far shard_optimizer()'s run is from one process, in parameters and in the whole state."""
    model = in_ddp(Net(kind), group, kind)
    one = pyps.torch.shard_optimizer(OPTIMIZERS[optimizer](groups(model.module)), shares, group)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one, STEPS)
    mean = GlobalMean(model)
    for step in range(STEPS):
        x, y = batch(step, group)
        mean.backward(nn.functional.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        one.zero_grad()
        schedule.step()
    right, whole = one_process(kind, optimizer)
    one.consolidate_state_dict()
    states = one.state_dict() if group.rank() == 0 else whole.state_dict()
    return {
        "parameters": off(flat(model.parameters()), right),
        "state": _states_apart(states, whole.state_dict()),
    }


def _states_apart(found: dict[str, Any], right: dict[str, Any]) -> float:
    """How far whole states are apart; infinite where names, shapes or groups differ."""
    if found["param_groups"] != right["param_groups"] or found["state"].keys() != right["state"].keys():
        return float("inf")
    far = 0.0
    for k, values in right["state"].items():
        if values.keys() != found["state"][k].keys():
            return float("inf")
        for name, value in values.items():
            one = found["state"][k][name]
            if isinstance(value, torch.Tensor):
                if one.shape != value.shape or one.dtype != value.dtype:
                    return float("inf")
                far = max(far, float((one - value).abs().max() / value.abs().max().clamp(min=1e-12)))
            elif abs(one - value) > 1e-12:
                return float("inf")
    return far


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a moving mean: each element by itself."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_(torch.sign(0.9 * mean + 0.1 * p.grad), alpha=-group["lr"])
                    mean.lerp_(p.grad, 0.01)


class ByNorm(Lion):
    """Steps by a parameter's own norm, as LARS and LAMB."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * p.norm() / p.grad.norm(), alpha=-group["lr"])


def optimizer_refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """Return what is said of optimizers, shares and parameters that do not fit."""
    rank, shares = group.rank(), [0.75, 0.25]
    found: dict[str, str] = {}

    def said(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "nothing"
        except InputError as error:
            found[name] = str(error)

    def sharded(optimizer: Any, own: Any = shares) -> Any:
        return pyps.torch.shard_optimizer(optimizer, own, group)

    matrices = [p for p in Net().parameters() if p.ndim == 2]
    said("Adafactor", lambda: sharded(torch.optim.Adafactor(matrices)))
    said("Muon", lambda: sharded(torch.optim.Muon([nn.Parameter(m.float()) for m in matrices])))
    said("LBFGS", lambda: sharded(torch.optim.LBFGS(matrices)))
    said("by norm", lambda: sharded(ByNorm(matrices)))
    outer = torch.optim.SGD(matrices, lr=0.1)
    vars(outer)["inner"] = torch.optim.SGD(matrices, lr=0.1)
    said("nested", lambda: sharded(outer))
    said("Lion", lambda: sharded(Lion(Net().parameters())))
    said(
        "unlike shares",
        lambda: sharded(torch.optim.SGD(Net().parameters()), [0.5 + rank / 4, 0.5 - rank / 4]),
    )
    said("unlike kinds", lambda: sharded((torch.optim.SGD, torch.optim.Adam)[rank](Net().parameters())))
    said("unlike parameters", lambda: sharded(torch.optim.SGD(Net(("plain", "frozen")[rank]).parameters())))
    said("a sum of 3", lambda: sharded(torch.optim.SGD(Net().parameters()), [2, 1]))
    one = sharded(torch.optim.AdamW(Net().parameters()))
    said("twice", lambda: sharded(one))
    said("state_dict", one.state_dict)
    late = nn.Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    one.add_param_group({"params": [late]})
    said("added", one.step)
    model = Net()
    other = sharded(torch.optim.SGD(model.parameters(), lr=0.1))
    model.first.weight.data = model.first.weight.data.clone()
    said("moved", other.step)
    table = nn.Embedding(5, 3, sparse=True)
    sparse = sharded(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    said("sparse", sparse.step)
    return found


def after_an_error(group: dist.ProcessGroup) -> bool:
    """Return whether a step that another hook refuses leaves the optimizer with whole parameters."""
    model = Net()
    one = pyps.torch.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), [0.5, 0.5], group)
    handle = one.register_step_pre_hook(_refuse)
    try:
        one.step()
    except ArithmeticError:
        handle.remove()
    shown = [p for one_group in one.param_groups for p in one_group["params"]]
    return all(a is b for a, b in zip(shown, model.parameters(), strict=True))


def _refuse(*_: Any) -> None:
    raise ArithmeticError


def with_closure(group: dist.ProcessGroup) -> float:
    """Return how far a run whose steps take closures is from one process."""
    runs = []
    for is_sharded in (True, False):
        model = Net()
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_sharded:
            pyps.torch.shard_optimizer(one, [0.7, 0.3], group)
        for step in range(3):

            def closure(model: nn.Module = model, one: Any = one, step: int = step) -> torch.Tensor:
                one.zero_grad()
                x, y = numbers(step, ROWS, torch.float64)
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            assert one.step(closure) is not None
        runs.append(flat(model.parameters()))
    return off(*runs)


def scaled(group: dist.ProcessGroup, shares: list[float]) -> dict[str, Any]:
    """Train float32 with a GradScaler; at step 2 one element of one gradient is infinite on all ranks, as a
    reduction makes it, within one rank's piece.
    """
    runs = []
    for is_sharded in (True, False):
        model = Net().float()
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_sharded:
            pyps.torch.shard_optimizer(one, shares, group)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            x, y = numbers(step, ROWS)
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            if step == 2:
                model.first.weight.grad[0, 0] = float("inf")
            scaler.unscale_(one)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(one)
            scaler.update()
            one.zero_grad()
        runs.append((flat(model.parameters()), scaler.get_scale()))
    return {"off": off(runs[0][0], runs[1][0]), "scales": (runs[0][1], runs[1][1])}


def state_bytes(group: dist.ProcessGroup, shares: list[float]) -> float:
    """Return this rank's bytes of the state of AdamW, in proportion to those of one process."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    one = pyps.torch.shard_optimizer(torch.optim.AdamW(model.parameters()), shares, group)
    model(torch.ones(2, 64)).sum().backward()
    one.step()
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in one.state.values()
        for value in values.values()
        if value.ndim
    }
    return sum(held.values()) / (2 * sum(p.nbytes for p in model.parameters()))


def kept(group: dist.ProcessGroup, folder: str, shares: list[float], steps: int, loads: bool) -> list[float]:
    """Train up to a step, on from pyps.torch's checkpoint if there is one; return this rank's parameters."""
    model = in_ddp(Net(), group)
    one = pyps.torch.shard_optimizer(OPTIMIZERS["AdamW"](groups(model.module)), shares, group)
    mean, first = GlobalMean(model), 0
    if loads:
        found = pyps.torch.load(folder, model, one, group=group)
        assert found is not None
        first = found["step"]
    for step in range(first, steps):
        x, y = batch(step, group)
        mean.backward(nn.functional.mse_loss(model(x), y))
        one.step()
        one.zero_grad()
    pyps.torch.save(folder, model, one, step=steps, group=group)
    return flat(model.parameters()).tolist()
