"""Define the jobs of the tests of sharding: each function runs on all ranks of a group.

A run on ranks with uneven batches and shares is compared with one process that has all samples, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_tools import flat, mine, numbers, off
from safetensors.torch import load, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyps.torch
from pyps.errors import InputError
from pyps.sharding import bytes_held, gathered, whole_state_dict
from pyps.torch import GlobalMean, UnevenSyncBatchNorm

BATCHES = {2: [8, 4], 3: [7, 4, 1], 4: [5, 4, 2, 1]}
STEPS, ROWS = 20, 12


class Lora(nn.Module):
    """A frozen linear layer and the adapter that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(9, 2, bias=False), nn.Linear(2, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """[n, 8] -> [n, 4], in blocks; kind: what is unusual about it."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first = nn.Linear(8, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(9, 4)
        self.norm, self.scale = nn.LayerNorm(9), nn.Parameter(torch.tensor(1.5))
        if kind == "tied":  # two blocks, and a block and the root
            self.blocks[2][0].weight = self.blocks[0][0].weight
            self.middle = nn.Linear(9, 9)
            self.middle.weight = self.blocks[1][0].weight
        if kind == "unused":
            self.unused = nn.Linear(3, 3)
        if kind == "nested":
            inner = nn.Sequential(nn.Linear(9, 9), nn.Tanh())
            self.blocks[0] = nn.Sequential(nn.Linear(9, 9), inner)
        if kind == "lora":
            self.requires_grad_(False)
            for block in self.blocks:
                block[0] = Lora(block[0])
        if kind == "frozen":
            self.blocks[1].requires_grad_(False)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(9)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "checkpoint over blocks":
            return self.last(self.norm(checkpoint(self._in_blocks, x, use_reentrant=False))) * self.scale
        x = self._in_blocks(x)
        if self.kind == "tied":
            x = torch.tanh(self.middle(x))
        return self.last(self.norm(x)) * self.scale

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.kind in ("checkpoint", "reentrant checkpoint"):
                x = x + checkpoint(block, x, use_reentrant=self.kind != "checkpoint")
            else:
                x = x + block(x)
            if self.kind == "shared block":
                x = x + self.blocks[0](x)
        return x


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


def one_process(
    kind: str, optimizer: str, steps: int = STEPS, is_scheduled: bool = True
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
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
        if is_scheduled:
            schedule.step()
    return flat(model.parameters()), one


def batch(step: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = numbers(step, ROWS, torch.float64)
    rows = mine(BATCHES[group.size()], group)
    return x[rows], y[rows]


def _train(model: nn.Module, one: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Train as one_process() does, with this rank's samples."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one, STEPS)
    mean = GlobalMean(model)
    for step in range(STEPS):
        x, y = batch(step, group)
        mean.backward(nn.functional.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        one.zero_grad()
        schedule.step()


def net_of(kind: str, group: dist.ProcessGroup) -> Net:
    """A Net whose batch norm is that of all ranks' samples."""
    found: Any = UnevenSyncBatchNorm.convert(Net(kind), group)
    return found  # type: ignore[no-any-return]


def in_ddp(model: nn.Module, group: dist.ProcessGroup, kind: str = "plain") -> DistributedDataParallel:
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=1, find_unused_parameters=kind == "unused"
    )


def optimizer_steps(
    group: dist.ProcessGroup, shares: list[float], kind: str = "plain", optimizer: str = "AdamW"
) -> dict[str, float]:
    """Return how far shard_optimizer()'s run is from one process, in parameters and in the whole state."""
    model = in_ddp(net_of(kind, group), group, kind)
    one = pyps.torch.shard_optimizer(OPTIMIZERS[optimizer](groups(model.module)), shares, group)
    _train(model, one, group)
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
    said("one refuses", lambda: sharded((torch.optim.SGD, torch.optim.Adafactor)[rank](matrices)))
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


def with_masters(group: dist.ProcessGroup, shares: list[float], others: list[float]) -> dict[str, Any]:
    """Train bf16 with master weights, from step 3 on in a new model with other shares; return how far the
    parameters and masters are from one process that has masters, and the bytes held, over parameters.
    """
    right = Net().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in right.parameters()]
    one = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1)
    found: Any = None
    sharded: Any = None
    for step in range(6):
        if step in (0, 3):
            state = (found.module.state_dict(), _whole_state(sharded)) if step else None
            found = in_ddp(Net().bfloat16(), group)
            sharded = torch.optim.AdamW(found.parameters(), lr=0.01, weight_decay=0.1)
            own = others if step else shares
            pyps.torch.shard_optimizer(sharded, own, group, master_dtype=torch.float32)
            if state is not None:
                sharded.load_state_dict(state[1])
                found.module.load_state_dict(state[0])
        if step == 4:  # what a script writes into parameters counts
            for model in (right, found.module):
                model.first.weight.data.mul_(2)
            dict(zip(right.parameters(), masters, strict=True))[right.first.weight].data.copy_(
                right.first.weight
            )
        x, y = numbers(step, ROWS, torch.bfloat16)
        for model in (right, found):
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p, master in zip(right.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        sharded.step()
        one.step()
        for p, master in zip(right.parameters(), masters, strict=True):
            p.data.copy_(master)
        for each in (sharded, right):
            each.zero_grad()
    states = _whole_state(sharded)["state"]
    return {
        "parameters": off(flat(found.parameters()), flat(right.parameters())),
        "masters": off(flat(states[k]["master"] for k in range(len(masters))), flat(masters)),
        "moments": off(
            flat(v["exp_avg"] for v in states.values()), flat(s["exp_avg"] for s in one.state.values())
        ),
        "bytes": bytes_held(found, sharded)["optimizer"] / sum(p.numel() for p in right.parameters()),
    }


def _whole_state(sharded: Any) -> dict[str, Any]:
    sharded.consolidate_state_dict(to=None)
    found: dict[str, Any] = sharded.state_dict()
    return found


def in_safetensors(group: dist.ProcessGroup) -> bool:
    """Return whether a model whose optimizer is sharded goes into safetensors and back, and trains on."""
    model = Net()
    one = pyps.torch.shard_optimizer(OPTIMIZERS["AdamW"](groups(model)), [0.7, 0.3], group)
    all_step(model, one, 0)
    packed = save(model.state_dict())  # refuses tensors that share a storage
    before = flat(model.parameters())
    all_step(model, one, 1)
    moved = not torch.equal(before, flat(model.parameters()))
    model.load_state_dict(load(packed))
    same = torch.equal(before, flat(model.parameters()))
    all_step(model, one, 2)
    return moved and same


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


def sharded(
    model: Any, shares: list[float], group: dist.ProcessGroup, inner: str = "blocks", **options: Any
) -> Any:
    """Shard the blocks of a Net, then the Net; of a nested one layers within blocks before."""
    if model.kind == "nested":
        pyps.torch.shard(model.blocks[0][1][0], shares, group, **options)
    for block in getattr(model, inner):
        pyps.torch.shard(block, shares, group, **options)
    return pyps.torch.shard(model, shares, group, **options)


def module_steps(
    group: dist.ProcessGroup,
    shares: list[float],
    kind: str = "plain",
    optimizer: str = "AdamW",
    prefetch: bool = True,
) -> dict[str, float]:
    """Return how far shard()'s run is from one process, in parameters and in the whole states."""
    torch.manual_seed(dist.get_rank())  # ranks begin as the first one
    model = sharded(net_of(kind, group), shares, group, prefetch=prefetch)
    one = OPTIMIZERS[optimizer](groups(model))
    _train(model, one, group)
    right, whole = one_process(kind, optimizer)
    found = whole_state_dict(model)
    plain = Net(kind)
    plain.load_state_dict(found)
    return {
        "parameters": off(flat(plain.parameters()), right),
        "state": _states_apart(whole_state_dict(one), whole.state_dict()),
    }


def micro_batches(
    group: dist.ProcessGroup, shares: list[float], parts: list[int], stage: int
) -> dict[str, float]:
    """Return how far a run in micro-batches, of unlike numbers on the ranks, is from one process."""
    model: Any = sharded(Net(), shares, group) if stage == 3 else in_ddp(Net(), group)
    one = OPTIMIZERS["AdamW"](groups(model))
    if stage == 1:
        pyps.torch.shard_optimizer(one, shares, group)
    mean = GlobalMean(model)
    for step in range(3):
        for x, y in mean.accumulate(batch(step, group), parts):
            mean.backward(nn.functional.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        one.zero_grad()
    found = gathered_flat(model) if stage == 3 else flat(model.parameters())
    return {"parameters": off(found, one_process("plain", "AdamW", 3, is_scheduled=False)[0])}


def in_no_sync(group: dist.ProcessGroup, shares: list[float]) -> float:
    """Return how far shard_optimizer() is from one process, where a script itself adds up micro-batches."""
    model = in_ddp(Net(), group)
    one = pyps.torch.shard_optimizer(OPTIMIZERS["AdamW"](groups(model)), shares, group)
    for step in range(3):
        x, y = numbers(step, ROWS, torch.float64)
        x, y = (part.chunk(group.size())[group.rank()].chunk(2) for part in (x, y))
        with model.no_sync():
            (nn.functional.mse_loss(model(x[0]), y[0]) / 2).backward()
        (nn.functional.mse_loss(model(x[1]), y[1]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        one.step()
        one.zero_grad()
    return off(flat(model.parameters()), one_process("plain", "AdamW", 3, is_scheduled=False)[0])


def gathered_flat(model: nn.Module) -> torch.Tensor:
    with gathered(model):
        return flat(model.parameters())


def several_passes(group: dist.ProcessGroup) -> dict[str, float]:
    """Return how far gradients are off: of two passes before two backward passes, of two backward passes of
    one graph, and of passes that add up.
    """
    found = {}
    x, y = numbers(0, ROWS, torch.float64)
    for name in ("two forward passes", "a graph kept", "passes that add up"):
        gradients = []
        for is_sharded in (True, False):
            model = Net()
            if is_sharded:
                sharded(model, [0.6, 0.4], group)
            if name == "two forward passes":
                losses = [nn.functional.mse_loss(model(x * k), y) for k in (1, 2)]
                for loss in losses:
                    loss.backward()
            elif name == "a graph kept":
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                for k in (1, 2):
                    nn.functional.mse_loss(model(x * k), y).backward()
            norms = [p.grad.norm() for p in model.parameters()]
            gradients.append(torch.stack([*norms, nn.utils.clip_grad_norm_(model.parameters(), 1e9)]))
        found[name] = off(*gradients)
    return found


def norms(group: dist.ProcessGroup) -> dict[str, float]:
    """Return how far norms of orders are off, of all gradients and of each one's detached data."""
    x, y = numbers(0, ROWS, torch.float64)
    found: dict[str, list[torch.Tensor]] = {}
    for is_sharded in (True, False):
        model = Net()
        if is_sharded:
            sharded(model, [0.6, 0.4, 0][: group.size()], group)
        nn.functional.mse_loss(model(x), y).backward()
        for order in (1.0, 2.0, 3.0, float("inf")):
            total = nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=order)
            found.setdefault(str(order), []).append(total)
        detached = [p.grad.detach().norm(2) for p in model.parameters()]
        found.setdefault("detached", []).append(torch.stack(detached))
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        found.setdefault("clipped", []).append(nn.utils.clip_grad_norm_(model.parameters(), 1e9) / before)
    return {name: off(*pair) for name, pair in found.items()}


def scaler_on_owners(group: dist.ProcessGroup, shares: list[float]) -> list[float]:
    """Return the scales of a GradScaler: at step 1 an element of one rank's piece alone is infinite."""
    model = sharded(Net().float(), shares, group)
    one = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(3):
        x, y = numbers(step, ROWS)
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step == 1:
            for p in model.parameters():
                if shares[group.rank()] == max(shares) and p.grad.numel():
                    p.grad[0] = float("inf")
                    break
        scaler.step(one)
        scaler.update()
        one.zero_grad()
        scales.append(scaler.get_scale())
    return [*scales, float(gathered_flat(model).isfinite().all())]


def precision(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the types of a run in bf16 with parts in float32, and how far its gradient is off."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    seen: list[torch.dtype] = []
    model = Net().float()
    model.blocks[0].register_forward_hook(
        lambda _, args, out: seen.extend([args[0].dtype, model.blocks[0][0].weight.dtype])
    )
    for block in model.blocks:
        pyps.torch.shard(block, [0.6, 0.4], group, mp_policy=MixedPrecisionPolicy(**low))
    policy = MixedPrecisionPolicy(output_dtype=torch.float32, **low)
    pyps.torch.shard(model, [0.6, 0.4], group, mp_policy=policy)
    x, y = numbers(0, ROWS)
    output = model(x)
    nn.functional.mse_loss(output, y).backward()
    seen += [
        output.dtype,
        *{p.grad.dtype for p in model.parameters()},
        *{p.dtype for p in model.parameters()},
    ]
    right = Net().float()
    nn.functional.mse_loss(right(x), y).backward()
    pair = [torch.stack([p.grad.norm() for p in one.parameters()]) for one in (model, right)]
    return {"types": [str(one) for one in seen], "off": off(*pair)}


def module_refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """Return what is said of what does not fit, on this rank."""
    rank, found = group.rank(), dict[str, str]()
    x, y = numbers(0, ROWS, torch.float64)

    def said(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "nothing"
        except InputError as error:
            found[name] = str(error)

    class Reads(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(super().forward(x), self.blocks[0][0].weight[:, :4])

    class Skips(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for k, block in enumerate(self.blocks):
                x = x if k == 1 and rank == 1 else x + block(x)
            return self.last(self.norm(x))

    class Hides(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return _Box(super().forward(x))

    options = {"timeout": 3.0}
    said("reads", lambda: sharded(Reads(), [0.5, 0.5], group, **options)(x))
    said("skips", lambda: sharded(Skips(), [0.5, 0.5], group, **options)(x))
    said("hides", lambda: sharded(Hides(), [0.5, 0.5], group, **options)(x))
    model = sharded(Net(), [0.5, 0.5], group, **options)
    said("another pass", lambda: model(x) if rank else gathered(model).__enter__())
    said("unlike shares", lambda: sharded(Net(), [[0.5, 0.5], [0.6, 0.4]][rank], group)(x))
    said("twice", lambda: pyps.torch.shard(model, [0.5, 0.5], group))
    other = sharded(Net(), [0.5, 0.5], group)
    said("assigned", lambda: other.load_state_dict(Net().state_dict(), assign=True))
    state = Net().state_dict() | {"first.weight": torch.ones(3)}
    said("another shape", lambda: other.load_state_dict(state))
    said("moved", lambda: other.float()(x))
    said("gathered", lambda: gathered(Net()).__enter__())
    norm = sharded(Net(), [0.5, 0.5], group)
    nn.functional.mse_loss(norm(x), y).backward()
    said("norm by rows", lambda: next(norm.parameters()).grad.norm(dim=0))
    GlobalMean(norm)
    said("plain", lambda: nn.functional.mse_loss(norm(x), y).backward())
    said("Adafactor", torch.optim.Adafactor(norm.parameters()).step)
    said("LBFGS", lambda: torch.optim.LBFGS(norm.parameters()).step(lambda: torch.zeros(())))
    said("by norm", ByNorm(norm.parameters()).step)
    early = Net()
    before = torch.optim.SGD(early.parameters(), lr=0.1)
    sharded(early, [0.5, 0.5], group)
    said("made before", before.step)
    lonely = sharded(Net(), [0.5, 0.5], group, **options)
    lonely(x)
    if rank == 1:
        said("alone", lambda: lonely(x))
    return found


class _Box:
    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner


def without_gradients(group: dist.ProcessGroup) -> float:
    """Return how far outputs without gradients are off: in step, and alone within gathered()."""
    x, _ = numbers(0, ROWS, torch.float64)
    model, right = sharded(Net(), [0.7, 0.3], group), Net()
    with torch.no_grad():
        outputs = [model(x), model(x)]
        with gathered(model):
            outputs += [model(x) for _ in range(1 + group.rank())]
            names = set(model.state_dict()) == set(right.state_dict())
            outputs.append(model.state_dict()["first.weight"] @ x.T)
        assert names
        wanted = [right(x)] * (3 + group.rank()) + [right.first.weight @ x.T]
    return off(flat(outputs), flat(wanted))


def all_step(model: nn.Module, one: torch.optim.Optimizer, step: int) -> None:
    """All ranks have all samples."""
    x, y = numbers(step, ROWS, torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    one.step()
    one.zero_grad()


def in_two_lines(group: dist.ProcessGroup, own: list[float]) -> float:
    """Return how far uneven() with shares is from uneven() without."""
    found = []
    rows = torch.utils.data.TensorDataset(*numbers(0, 3 * ROWS, torch.float64))
    for shares in (None, own):
        model = Net()
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp = in_ddp(model, group)
        ddp, loader, step = pyps.torch.uneven(ddp, rows, ROWS, optimizer=one, shares=shares)
        for x, y in loader:
            one.zero_grad()
            step.backward(nn.functional.mse_loss(ddp(x), y))
            step()
        found.append(flat(model.parameters()))
    return off(*found)
