"""Ranks that try features under a trainer: how far the gradient is from one process's, or what refused it.

TRAINER names it; FEATURES the features, by default all. Prints JSON: {feature: error or message}.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from trainer_checks import Model, fsdp_model, whole_gradient

from pyps.errors import InputError
from pyps.torch import UnevenBatchSampler, UnevenSyncBatchNorm, check_gradient, count_targets, weighted_hook

SPLIT = [9, 4]
mse = nn.functional.mse_loss


class Kit:
    """A trainer's own loop: prepares models, calls backward."""

    def prepare(self, *models: nn.Module, **options: Any) -> list[Any]:
        """Models as they are trained. options: of weighted_hook."""
        prepared = [DistributedDataParallel(model) for model in models]
        self.hooks: list[Any] = [weighted_hook(model, **options) for model in prepared]
        return prepared

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[no-any-return]

    def inner(self, model: Any) -> Any:
        return model.module

    def loader(self, data: DataLoader[Any]) -> Any:
        """The loader as the trainer hands it out: a plain loop has it as it is."""
        return data


class Sharded(Kit):
    def prepare(self, *models: nn.Module, **options: Any) -> list[Any]:
        prepared = [fsdp_model(model) for model in models]
        self.hooks = [weighted_hook(model, **options) for model in prepared]
        return prepared

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(False)
        return nullcontext()

    def inner(self, model: Any) -> Any:
        return model


class Accelerated(Kit):
    def prepare(self, *models: nn.Module, **options: Any) -> list[Any]:
        from accelerate.state import AcceleratorState, GradientState

        from pyps.torch.accelerate import UnevenAccelerator

        AcceleratorState._reset_state()
        GradientState._reset_state()
        options.setdefault("plan", None)
        self.accelerator = UnevenAccelerator(cpu=True, **options)
        prepared = [self.accelerator.prepare(model) for model in models]
        self.hooks = self.accelerator.run.hooks
        return prepared

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.accelerator.backward(loss, **options)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(model)  # type: ignore[no-any-return]

    def loader(self, data: DataLoader[Any]) -> Any:
        return self.accelerator.prepare(data)


class Fabric(Kit):
    def prepare(self, *models: nn.Module, **options: Any) -> list[Any]:
        import lightning

        from pyps.torch.lightning import UnevenFabricStrategy

        strategy = UnevenFabricStrategy(process_group_backend="gloo", **options)
        self.fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        self.fabric.launch()
        prepared = [self.fabric.setup(model) for model in models]
        self.hooks = strategy.run.hooks
        return prepared

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.fabric.backward(loss, **options)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return self.fabric.no_backward_sync(model)  # type: ignore[no-any-return]

    def inner(self, model: Any) -> Any:
        return model.module

    def loader(self, data: DataLoader[Any]) -> Any:
        return self.fabric.setup_dataloaders(data)


class Case:
    """A model, alone and under the trainer; the batch of all ranks and this rank's."""

    def __init__(self, kit: Kit, model: type[nn.Module] = Model, **options: Any) -> None:
        torch.manual_seed(0)
        self.kit, self.alone = kit, model()
        (self.model,) = kit.prepare(copy.deepcopy(self.alone), **options)
        self.inner = kit.inner(self.model)
        self.whole, self.own = batches(0)

    def same(self, loss: Callable[..., torch.Tensor]) -> float:
        """loss(model, its own module, inputs, targets) -> the mean loss; the error of its gradient."""
        loss(self.alone, self.alone, *self.whole).backward()  # type: ignore[no-untyped-call]
        self.kit.backward(loss(self.model, self.inner, *self.own))
        return self.error()

    def error(self) -> float:
        right = torch.cat([p.grad.flatten() for p in self.alone.parameters() if p.grad is not None])
        found = whole_gradient(self.inner)
        return float((found - right).norm() / right.norm())


def batches(seed: int, split: list[int] = SPLIT) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The samples of all ranks, and this rank's."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(split), 6, generator=draws, dtype=torch.float64)
    targets = torch.randn(sum(split), 3, generator=draws, dtype=torch.float64)
    targets += torch.linspace(-2, 2, sum(split))[:, None]
    rank = dist.get_rank()
    own = slice(sum(split[:rank]), sum(split[: rank + 1]))
    return [inputs, targets], [inputs[own], targets[own]]


def plain(kit: Kit) -> float:
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y))


def two_models(kit: Kit) -> float:
    torch.manual_seed(0)
    alone = [Model(), Model()]
    models = kit.prepare(*copy.deepcopy(alone))
    whole, own = batches(0)
    for pair, (x, y), backward in ((alone, whole, torch.Tensor.backward), (models, own, kit.backward)):
        backward(mse(pair[0](x) + 0.5 * pair[1](x), y))
    right = torch.cat([p.grad.flatten() for m in alone for p in m.parameters() if p.grad is not None])
    found = torch.cat([whole_gradient(kit.inner(model)) for model in models])
    return float((found - right).norm() / right.norm())


def gan(kit: Kit) -> float:
    """The discriminator twice, then the generator through it."""
    torch.manual_seed(0)
    alone = [nn.Linear(6, 3).double(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()]
    models = kit.prepare(*copy.deepcopy(alone))
    whole, own = batches(0)
    ends = []
    for (g, d), (x, y), backward in ((alone, whole, torch.Tensor.backward), (models, own, kit.backward)):
        fake = g(x)
        backward(d(y).square().mean() + (d(fake.detach()) - 1).square().mean())
        first = [p.grad.clone() for p in d.parameters() if p.grad is not None]
        d.zero_grad()
        backward(d(fake).square().mean())
        grads = [p.grad for p in g.parameters() if p.grad is not None]
        ends.append(torch.cat([getattr(t, "full_tensor", lambda t=t: t)().flatten() for t in first + grads]))
    return float((ends[1] - ends[0]).norm() / ends[0].norm())


def bypassing(kit: Kit) -> float:
    case = Case(kit)
    if isinstance(kit, Sharded):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(case.model, "encode")
    return case.same(lambda _, inner, x, y: mse(inner.encode(x), y))


def a_part_besides(kit: Kit) -> float:
    """The model, and a part of it for other samples."""
    return Case(kit).same(lambda m, i, x, y: mse(m(x), y) + i.layers[0](x[:2]).mean())


def auxiliary(kit: Kit) -> float:
    """A mixture of experts' balance, say, from the module's attribute."""

    def loss(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(model(x), y) + inner.balance

    return Case(kit).same(loss)


def features(kit: Kit) -> float:
    """From a forward hook."""
    case, kept = Case(kit), {}
    for model in (case.alone, case.inner):
        model.layers[0].register_forward_hook(lambda layer, _, found: kept.__setitem__(id(layer), found))
    return case.same(lambda m, i, x, y: mse(m(x), y) + kept[id(i.layers[0])].pow(4).mean())


class Found:
    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class Unusual(Model):
    def forward(self, x: torch.Tensor) -> Any:
        return Found(super().forward(x))


def unusual_output(kit: Kit) -> float:
    return Case(kit, Unusual).same(lambda m, _, x, y: mse(m(x).scores, y))


def eval_between(kit: Kit) -> float:
    case = Case(kit)

    def loss(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = mse(model(x), y)
        model.eval()
        model(x[:2])
        model.train()
        return found

    return case.same(loss)


def two_forwards(kit: Kit) -> float:
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y) + mse(m(x + 1), 2 * y))


def unlike_forwards(kit: Kit) -> float:
    return Case(kit).same(lambda m, _, x, y: mse(m(x), y) + m(x[:2]).square().mean())


def own_accumulation(kit: Kit) -> float:
    case = Case(kit)
    case.whole, case.own = batches(0, [8, 4])
    mse(case.alone(case.whole[0]), case.whole[1]).backward()  # type: ignore[no-untyped-call]
    half = len(case.own[0]) // 2
    for number, part in enumerate((slice(half), slice(half, None))):
        with kit.no_sync(case.model) if number == 0 else nullcontext():
            kit.backward(mse(case.model(case.own[0][part]), case.own[1][part]) / 2)
    return case.error()


def unlike_accumulation(kit: Kit) -> float:
    case = Case(kit)
    for number, part in enumerate((slice(1), slice(1, None))):
        with kit.no_sync(case.model) if number == 0 else nullcontext():
            kit.backward(mse(case.model(case.own[0][part]), case.own[1][part]) / 2)
    return 1.0


def accumulated(kit: Kit) -> float:
    """By the trainer's own means."""
    if isinstance(kit, Accelerated):
        case = Case(kit, gradient_accumulation_steps=3)
        rounds = [x.tensor_split(3) for x in case.own]
        for x, y in zip(*rounds, strict=True):
            with kit.accelerator.accumulate(case.model):
                kit.backward(mse(case.model(x), y))
    elif isinstance(kit, Fabric):
        case = Case(kit, accumulate=3)
        for number, (x, y) in enumerate(zip(*(x.tensor_split(3) for x in case.own), strict=True)):
            with kit.no_sync(case.model) if number < 2 else nullcontext():
                kit.backward(mse(case.model(x), y))
    else:
        case = Case(kit)
        for x, y in kit.hooks[0].accumulate(case.own, 3):
            kit.backward(mse(case.model(x), y))
    mse(case.alone(case.whole[0]), case.whole[1]).backward()  # type: ignore[no-untyped-call]
    return case.error()


def not_zeroed(kit: Kit) -> float:
    """Micro-batches on top of an earlier round's gradients."""
    case = Case(kit)
    for _ in range(2):
        for x, y in kit.hooks[0].accumulate(case.own, 2):
            kit.backward(mse(case.model(x), y))
    return 1.0


def several_syncs(kit: Kit) -> float:
    case = Case(kit)
    for seed in range(3):
        whole, own = batches(seed, SPLIT[:: 1 - 2 * (seed % 2)])
        mse(case.alone(whole[0]), whole[1]).backward()  # type: ignore[no-untyped-call]
        kit.backward(mse(case.model(own[0]), own[1]))
    return case.error()


def sums_several_syncs(kit: Kit) -> float:
    case = Case(kit, reduction="sum")
    for _ in range(3):
        kit.backward(mse(case.model(case.own[0]), case.own[1], reduction="sum"))
    return 1.0


def summed(kit: Kit) -> float:
    case = Case(kit, reduction="sum")
    (mse(case.alone(case.whole[0]), case.whole[1], reduction="sum") / sum(SPLIT)).backward()  # type: ignore[no-untyped-call]
    kit.backward(mse(case.model(case.own[0]), case.own[1], reduction="sum"))
    return case.error()


def joined(kit: Kit) -> float:
    case, rank = Case(kit), dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (case.alone, case.model)]
    splits = [[5, 3], [6, 2], [4, 0], [3, 0]]
    ddp = getattr(case.model, "_forward_module", case.model)
    with Join([ddp]):
        for seed, split in enumerate(splits):
            if split[rank]:
                optimizers[1].zero_grad()
                x, y = batches(seed, split)[1]
                kit.backward(mse(case.model(x), y))
                optimizers[1].step()
    for seed, split in enumerate(splits):
        optimizers[0].zero_grad()
        x, y = batches(seed, split)[0]
        mse(case.alone(x), y).backward()  # type: ignore[no-untyped-call]
        optimizers[0].step()
    found, right = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (case.model, case.alone)
    )
    return float((found - right).norm() / right.norm())


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = nn.Parameter(self.layers[2].weight[:, :6].clone())
        self.layers[0].weight = self.layers[2].weight
        self.layers[0].bias = nn.Parameter(self.layers[2].bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.tanh(torch.cat([self.layers[0](x)] * 2, 1)))  # type: ignore[no-any-return]


def tied(kit: Kit) -> float:
    return Case(kit, Tied).same(lambda m, _, x, y: mse(m(x), y))


def penalty(kit: Kit) -> float:
    """Return a penalty of the parameters themselves, the same on all ranks."""

    def loss(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = mse(model(x), y)
        if isinstance(kit, Sharded):
            return found + 0.1 * inner.layers[0](x).square().mean()
        return found + 0.1 * torch.stack([p.square().sum() for p in inner.parameters()]).sum()

    return Case(kit).same(loss)


def checkpointed(kit: Kit) -> float:
    """Activation checkpointing, reentrant."""

    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> Any:
            from torch.utils.checkpoint import checkpoint

            self.balance = x.new_zeros(())
            return checkpoint(self.layers, x.clone().requires_grad_(), use_reentrant=True)

    return Case(kit, Checkpointed).same(lambda m, _, x, y: mse(m(x), y))


def retained(kit: Kit) -> float:
    """backward() twice through one graph."""
    case = Case(kit)
    (2 * mse(case.alone(case.whole[0]), case.whole[1])).backward()  # type: ignore[no-untyped-call]
    loss = mse(case.model(case.own[0]), case.own[1])
    kit.backward(loss, retain_graph=True)
    kit.backward(loss)
    return case.error()


class Single(Model):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.float())


def autocast(kit: Kit) -> float:
    """Against one process in float32: bfloat16's roundings remain."""

    def loss(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse(model(x).double(), y)

    return Case(kit, Single).same(loss)


def clipped(kit: Kit) -> float:
    case = Case(kit)
    mse(case.alone(case.whole[0]), case.whole[1]).backward()  # type: ignore[no-untyped-call]
    kit.backward(mse(case.model(case.own[0]), case.own[1]))
    for model in (case.alone, case.inner):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return case.error()


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.tanh(self.norm(self.layers[0](x))))  # type: ignore[no-any-return]


def sync_norm(kit: Kit) -> float:
    class Converted(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.norm = UnevenSyncBatchNorm.convert(self.norm)  # type: ignore[assignment]

    case = Case(kit, Converted)
    right = Normed()
    right.load_state_dict(case.alone.state_dict())
    case.alone = right
    return case.same(lambda m, _, x, y: mse(m(x), y))


def compiled(kit: Kit) -> float:
    case = Case(kit)
    run = torch.compile(case.model, backend="aot_eager")
    mse(case.alone(case.whole[0]), case.whole[1]).backward()  # type: ignore[no-untyped-call]
    kit.backward(mse(run(case.own[0]), case.own[1]))
    return case.error()


def from_loader(kit: Kit, loader: DataLoader[Any], **options: Any) -> float:
    """The worst gradient of an epoch of its batches."""
    case = Case(kit, **options)
    prepared, worst = kit.loader(loader), 0.0
    for x, y in prepared:
        every: list[Any] = [None, None]
        dist.all_gather_object(every, [x, y])
        case.alone.zero_grad()
        case.model.zero_grad()
        mse(case.alone(torch.cat([e[0] for e in every])), torch.cat([e[1] for e in every])).backward()  # type: ignore[no-untyped-call]
        kit.backward(mse(case.model(x), y))
        worst = max(worst, case.error())
    return worst


def dataset(samples: int = 30) -> TensorDataset:
    return TensorDataset(*batches(1, [samples, 0])[0])


def shuffled_loader(kit: Kit) -> float:
    return from_loader(
        kit,
        DataLoader(dataset(), batch_size=12, shuffle=True),
        plan=SPLIT if isinstance(kit, Accelerated) else [16, 8],
    )


def custom_sampler(kit: Kit) -> float:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 30, 24)
    return from_loader(kit, DataLoader(dataset(), batch_size=12, sampler=weights))


def custom_batches(kit: Kit) -> float:
    """Batches of unlike lengths by a sampler of the script's own."""

    class Drawn:
        def __iter__(self) -> Any:
            yield from ([0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10])

        def __len__(self) -> int:
            return 4

    return from_loader(kit, DataLoader(dataset(), batch_sampler=Drawn()))  # type: ignore[arg-type]


def custom_batches_and_plan(kit: Kit) -> float:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 30, 24)
    return from_loader(kit, DataLoader(dataset(), batch_size=12, sampler=weights), plan=SPLIT)


def second_loader(kit: Kit) -> float:
    Case(kit)
    for _ in range(2):
        kit.loader(DataLoader(dataset(), batch_size=12, sampler=RandomSampler(dataset())))
    return 1.0


def loader_each_epoch(kit: Kit) -> float:
    case = Case(kit, plan=SPLIT)
    for _ in range(2):
        loader = kit.loader(DataLoader(dataset(), batch_size=sum(SPLIT), shuffle=True))
        for x, y in loader:
            case.model.zero_grad()
            kit.backward(mse(case.model(x), y))
    return 1.0


def sampler_of_samples(kit: Kit) -> float:
    batches = UnevenBatchSampler(30, SPLIT)
    loader: Any = DataLoader(dataset(), batch_size=12, sampler=batches)  # type: ignore[arg-type]
    return from_loader(kit, loader)


def unlike_norm_passes(kit: Kit) -> float:
    """UnevenSyncBatchNorm waits for all ranks in each micro-batch."""
    model = nn.Sequential(Model(), UnevenSyncBatchNorm(3)).double()
    (prepared,) = kit.prepare(model)
    for x, y in kit.hooks[0].accumulate(batches(1, [8, 4])[0], [2, 1]):
        kit.backward(mse(prepared(x), y))
    return 1.0


def counted_targets(kit: Kit) -> float:
    """Ragged texts through Hugging Face's GPT-2, whose loss shifts the labels; the loss is in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    draws = torch.Generator().manual_seed(3)
    words = torch.randint(20, (sum(SPLIT), 8), generator=draws)
    labels = words.clone()
    for row in range(len(labels)):
        labels[row, 2 + row % 6 :] = -100
    torch.manual_seed(0)
    alone = GPT2LMHeadModel(config)
    (model,) = kit.prepare(copy.deepcopy(alone), count=count_targets)
    own = slice(0, SPLIT[0]) if dist.get_rank() == 0 else slice(SPLIT[0], None)
    alone(input_ids=words, labels=labels).loss.backward()
    kit.backward(model(input_ids=words[own], labels=labels[own]).loss)
    right = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    found = whole_gradient(kit.inner(model))
    return float((found - right).norm() / right.norm())


def checked(kit: Kit) -> float:
    case = Case(kit)
    ddp = getattr(case.model, "_forward_module", case.model)
    return check_gradient(ddp, lambda m, x, y: mse(m(x), y), case.own).error


COMMON = {
    "plain loop": plain,
    "two models": two_models,
    "GAN, two optimizers": gan,
    "a bypassing forward": bypassing,
    "a part for other samples": a_part_besides,
    "an auxiliary loss (MoE)": auxiliary,
    "features by a hook": features,
    "an output of its own class": unusual_output,
    "eval() in between": eval_between,
    "two forwards, one loss": two_forwards,
    "two forwards, unlike batches": unlike_forwards,
    "micro-batches": accumulated,
    "own accumulation": own_accumulation,
    "own accumulation, unlike": unlike_accumulation,
    "no zero_grad()": not_zeroed,
    "several backward() a step": several_syncs,
    "a sum, several backward()": sums_several_syncs,
    "a loss that is a sum": summed,
    "tied weights": tied,
    "a penalty on weights": penalty,
    "activation checkpoints": checkpointed,
    "backward() twice": retained,
    "autocast": autocast,
    "clipping": clipped,
    "UnevenSyncBatchNorm": sync_norm,
    "the same, unlike micro-batches": unlike_norm_passes,
    "torch.compile": compiled,
    "targets, by count_targets": counted_targets,
    "check_gradient": checked,
}
JOIN = {"Join": joined}
BATCHES = {"batches as sampler=": sampler_of_samples}
LOADERS = {
    "shuffled loader": shuffled_loader,
    "a sampler of its own": custom_sampler,
    "batches of its own": custom_batches,
    "a plan nothing uses": custom_batches_and_plan,
    "a second shuffled loader": second_loader,
    "a new loader each epoch": loader_each_epoch,
}
KITS: dict[str, tuple[Callable[[], Kit], dict[str, Any]]] = {
    "DDP": (Kit, COMMON | JOIN | BATCHES),
    "FSDP2": (Sharded, COMMON),
    "Accelerate": (Accelerated, COMMON | JOIN | BATCHES | LOADERS),
    "Fabric": (Fabric, COMMON | JOIN | LOADERS),
}


def outcome(feature: Callable[[Any], float], kit: Any) -> float | str:
    """The error, or the message of what refused it."""
    try:
        return feature(kit)
    except InputError as error:
        return str(error)
    except (RuntimeError, TypeError) as error:  # of a library
        return " ".join(str(error).split())


def features_of(trainer: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return what makes its kit, and all features that are tried."""
    if trainer in KITS:
        from trainer_cells_of_models import OF_MODELS, OF_NO_SYNC

        make, features = KITS[trainer]
        return make, features | OF_MODELS | ({} if trainer == "FSDP2" else OF_NO_SYNC)
    from trainer_cells_of_loops import LOOPS

    return lambda: None, LOOPS[trainer]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trainer, wanted = os.environ["TRAINER"], os.environ.get("FEATURES")
    if trainer in ("DDP", "FSDP2"):
        dist.init_process_group("gloo")
    make, features = features_of(trainer)
    found = {name: outcome(features[name], make()) for name in (wanted.split("|") if wanted else features)}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, found)
    worst = {}
    for name, other in every[1].items():
        ours = found[name]
        worst[name] = ours if isinstance(ours, str) else other if isinstance(other, str) else max(ours, other)
    if dist.get_rank() == 0:
        print(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
