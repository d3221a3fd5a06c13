"""Ranks that try features under a trainer: the worst distance of a step's gradient from that of one process
with all ranks' samples, or what refused it.

TRAINER names it; FEATURES the features, by default all. Prints JSON: {feature: error or message}. The loops
here are the script's own; trainer_cells_of_loops has the trainers that own the loop.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import RandomSampler
from trainer_checks import Model, whole_gradient
from trainer_kits import (
    SAMPLES,
    SPLIT,
    Accelerated,
    Fabric,
    Kit,
    Loss,
    Plain,
    Script,
    Sharded,
    dataset,
    error_of,
    follow,
    whole,
)

from pyps.errors import InputError
from pyps.torch import UnevenBatchSampler, UnevenSyncBatchNorm

IGNORED = -100
mse = nn.functional.mse_loss


def trained(
    kit: Kit, loss: Loss, parts: int = 1, model: Callable[[], nn.Module] = Model, **options: Any
) -> float:
    """Two epochs of a usual loop."""
    script = Script(kit(parts, **options), model)
    for _ in range(2):
        batches: list[Any] = []
        for number, batch in enumerate(script.loader, 1):
            batches.append(batch)
            with script.kit.micro_batch(script.model, number):
                script.kit.backward(loss(script.model, script.inner, *batch))
                if number % parts == 0:
                    script.compare(loss, whole(batches))
                    script.step()
                    batches = []
    return script.worst


def plain(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y)


def classes_of(y: torch.Tensor) -> torch.Tensor:
    """A class for each sample; most are ignored, so a rank may have none."""
    return torch.where(y[:, 0] > -0.8, IGNORED, (y[:, 1] > 0).long())


def by_classes(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    return nn.functional.cross_entropy(model(x), classes_of(y), weight=weight)


def masked(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y[:, 0] > -1.5
    return (model(x)[kept] - y[kept]).square().sum() / (3 * int(kept.sum()))


def two_terms(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(model, inner, x, y) + by_classes(model, inner, x, y)


def summed(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y, reduction="sum")


def penalized(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = torch.stack([p.square().sum() for p in inner.parameters()]).sum()
    return mse(model(x), y) + 0.1 * weights


def gradient_penalty(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return mse(model(x), y) + (gradient.norm(dim=1) - 1).square().mean()


def balanced(model: Any, inner: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mixture of experts' balance, say, from the module's attribute."""
    return mse(model(x), y) + inner.balance


def eval_between(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = mse(model(x), y)
    model.eval()
    model(x[:1])
    model.train()
    return found


def two_forwards(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y) + mse(model(x + 1), 2 * y)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Linear(16, 6).double()
        self.layers[2].weight = nn.Parameter(self.layers[0].weight.T.clone().contiguous())
        self.layers[0] = nn.Linear(6, 16).double()
        self.again = self.layers[0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.layers[2](torch.tanh(self.layers[0](x))))[:, :3]


class Normed(Model):
    """With batch normalization: over all ranks' samples where it is `across`."""

    across = False

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(16).double()
        if self.across:
            self.norm = UnevenSyncBatchNorm.convert(self.norm)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[2](torch.tanh(self.norm(self.layers[0](x))))


class Across(Normed):
    across = True


def sync_norm(kit: Kit) -> float:
    script = Script(kit(), Across)
    right = Normed()
    right.load_state_dict(script.alone.state_dict())
    script.alone = right
    for batches, samples in script.rounds():
        script.kit.backward(plain(script.model, None, *batches[0]))
        script.compare(plain, samples)
        script.step()
    return script.worst


def clipped(kit: Kit) -> float:
    script = Script(kit())
    for batches, samples in script.rounds():
        script.optimizer.zero_grad()
        script.kit.backward(plain(script.model, None, *batches[0]))
        script.kit.clip(script.model, script.optimizer)
        script.alone.zero_grad()
        plain(script.alone, None, *samples).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(script.alone.parameters(), 0.1)
        script.worst = max(script.worst, error_of([script.inner], [script.alone]))
    return script.worst


def own_accumulation(kit: Kit, divided: int = 1) -> float:
    """By the script, of each batch's two halves."""
    script = Script(kit())
    for (batch,), samples in script.rounds():
        for k, part in enumerate(zip(*(values.tensor_split(2) for values in batch), strict=True)):
            with script.kit.no_sync(script.model) if k == 0 else nullcontext():
                script.kit.backward(plain(script.model, None, *part) / divided)
        script.compare(plain, samples)
        script.step()
    return script.worst


def two_models(kit: Kit) -> float:
    made, worst = kit(), 0.0
    torch.manual_seed(0)
    alone: list[nn.Module] = [Model(), Model()]
    inner: list[Any] = copy.deepcopy(alone)
    models = made.prepare(*inner)
    optimizer = made.optimizer(torch.optim.SGD([p for m in inner for p in m.parameters()], lr=0.01))
    for batch in made.loader():
        for pair, (x, y), backward in (
            (alone, whole([batch]), torch.Tensor.backward),
            (models, batch, made.backward),
        ):
            backward(mse(pair[0](x) + 0.5 * pair[1](x), y))
        worst = max(worst, error_of(inner, alone))
        optimizer.step()
        optimizer.zero_grad()
        made.ended()
        for mine, other in zip(alone, inner, strict=True):
            follow(mine, other)
    return worst


def gan(kit: Kit) -> float:
    """A discriminator's step, then the generator's through it: two models and optimizers on one loader."""
    made, worst = kit(), 0.0
    torch.manual_seed(0)
    alone: list[Any] = [
        nn.Linear(6, 3).double(),
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
    ]
    inner: list[Any] = copy.deepcopy(alone)
    models = made.prepare(*inner)
    optimizers = [made.optimizer(torch.optim.SGD(m.parameters(), lr=0.01)) for m in reversed(inner)]
    loader = made.loader()
    for _ in range(2):
        for batch in loader:
            samples, ends = whole([batch]), []
            for (g, d), (x, y), backward in (
                (alone, samples, torch.Tensor.backward),
                (models, batch, made.backward),
            ):
                fake = g(x)
                backward(d(y).square().mean() + (d(fake.detach()) - 1).square().mean())
                ends.append(whole_gradient(d if d in alone else inner[1]).clone())
                d.zero_grad()
                backward(d(fake).square().mean())
            worst = max(worst, float((ends[1] - ends[0]).norm() / ends[0].norm()))
            worst = max(worst, error_of(inner[:1], alone[:1]))
            for one in optimizers:
                one.step()
            made.ended()
            for mine, other in zip(alone, inner, strict=True):
                follow(mine, other)
                other.zero_grad()
    return worst


def closures(kit: Kit) -> float:
    """A loss that is computed twice a step, as of SAM: each round counts once."""
    script, rounds = Script(kit()), 0
    for batches, samples in script.rounds():
        for _ in range(2):
            script.optimizer.zero_grad()
            script.kit.backward(plain(script.model, None, *batches[0]))
            script.compare(plain, samples)
        script.step()
        rounds += 1
    trained = script.kit.sampler.state_dict()
    return script.worst if rounds == len(script.loader) and trained["position"] in (0, SAMPLES) else 1.0


def sam(kit: Kit) -> float:
    """Sharpness-aware minimization: the gradient at the parameters plus a step along the first gradient."""
    script, rounds = Script(kit()), 0
    for batches, samples in script.rounds():
        sides = (
            (script.alone, samples, torch.Tensor.backward),
            (script.model, batches[0], script.kit.backward),
        )
        for module, given, backward in sides:
            parameters = list(module.parameters())
            module.zero_grad()
            backward(plain(module, None, *given))
            slopes = [p.grad.detach().clone() for p in parameters]
            length = torch.stack([whole_of(slope).square().sum() for slope in slopes]).sum().sqrt()
            with torch.no_grad():
                for p, slope in zip(parameters, slopes, strict=True):
                    p.add_(slope, alpha=0.5 / float(length))
            module.zero_grad()
            backward(plain(module, None, *given))
            with torch.no_grad():
                for p, slope in zip(parameters, slopes, strict=True):
                    p.sub_(slope, alpha=0.5 / float(length))
        script.worst = max(script.worst, error_of([script.inner], [script.alone]))
        script.step()
        script.follow()
        rounds += 1
    trained = script.kit.sampler.state_dict()
    return script.worst if rounds == len(script.loader) and trained["position"] in (0, SAMPLES) else 1.0


def whole_of(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def past(kit: Kit) -> float:
    """loss.backward() in place of the library's."""
    script = Script(kit())
    assert script.kit.mean is not None
    for batches, _ in script.rounds():
        plain(script.model, None, *batches[0]).backward()  # type: ignore[no-untyped-call]
    return 1.0


def unfrozen(kit: Kit) -> float:
    """A layer that trains from the second step on."""

    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.layers[0].parameters():
                parameter.requires_grad = False

    script = Script(kit(), Frozen)
    for batches, samples in script.rounds():
        script.optimizer.zero_grad()
        script.kit.backward(plain(script.model, None, *batches[0]))
        script.compare(plain, samples)
        for model in (script.inner, script.alone):
            for parameter in model.layers[0].parameters():
                parameter.requires_grad = True
    return script.worst


def sampler_of_its_own(kit: Kit, plan: Any = None) -> float:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, 24)
    script = Script(kit(plan=plan), batch_size=12, shuffle=None, sampler=weights)
    for batches, samples in script.rounds():
        script.kit.backward(plain(script.model, None, *batches[0]))
        script.compare(plain, samples)
        script.step()
    return script.worst


def second_loader(kit: Kit) -> float:
    script = Script(kit())
    script.kit.loader(shuffle=None, sampler=RandomSampler(dataset()))
    return 1.0


def no_rounds(kit: Kit) -> float:
    """Fewer samples than a global batch, without the last round: it would train nothing."""
    script = Script(kit(), dataset=dataset(10), drop_last=True)
    return float(len(list(script.loader)))


def sampler_of_samples(kit: Kit) -> float:
    script = Script(kit(), batch_size=12, shuffle=None, sampler=UnevenBatchSampler(SAMPLES, SPLIT))
    return float(len(list(script.loader)))


def joined(kit: Kit) -> float:
    script = Script(kit())
    with Join([getattr(script.model, "_forward_module", script.model)]):
        for batches, _ in script.rounds():
            script.kit.backward(plain(script.model, None, *batches[0]))
    return 1.0


def checkpointed(kit: Kit) -> float:
    """Activation checkpointing."""

    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> Any:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.layers, x, use_reentrant=False)

    return trained(kit, plain, model=Checkpointed)


def compiled(kit: Kit) -> float:
    script = Script(kit())
    run = torch.compile(script.model, backend="aot_eager")
    for batches, samples in script.rounds():
        script.kit.backward(plain(run, None, *batches[0]))
        script.compare(plain, samples)
        script.step()
    return script.worst


def recipe(kit: Kit, ranks: int = 2) -> float:
    """Accelerate's, for a mean over tokens: sums over a gathered count. ranks: what it multiplies by."""
    script = Script(kit(2))
    accelerator = script.kit.accelerator
    for batches, samples in script.rounds():
        own = torch.stack([(classes_of(y) != IGNORED).sum() for _, y in batches]).sum()
        count = accelerator.gather(own).sum().item()
        for k, (x, y) in enumerate(batches):
            with script.model.no_sync() if k == 0 else nullcontext():
                loss = nn.functional.cross_entropy(script.model(x), classes_of(y), reduction="sum")
                accelerator.backward(loss * 2 * ranks / count)
        script.compare(lambda m, _, x, y: nn.functional.cross_entropy(m(x), classes_of(y)), samples)
        script.step()
    return script.worst


def without_items(kit: Kit) -> float:
    """A sum over this rank's own items, of which it may have none, where something small was gathered."""

    def rare(model: Any, _: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = y[:, 0] < -1.5
        return (model(x)[kept] - y[kept]).square().sum() / (3 * int(kept.sum()))

    script = Script(kit())
    for batch in script.loader:
        script.kit.accelerator.gather(torch.ones(1))
        script.kit.backward(rare(script.model, None, *batch))
        script.compare(rare, whole([batch]))
        script.step()
    return script.worst


def without_models(kit: Kit) -> float:
    """accumulate() without a model: each micro-batch is reduced, and is a mean by itself."""
    script = Script(kit(2))
    for batch in script.loader:
        (plain(script.alone, None, *whole([batch])) / 2).backward()  # type: ignore[no-untyped-call]
        with script.kit.accelerator.accumulate():
            script.kit.backward(plain(script.model, None, *batch))
            if script.kit.accelerator.sync_gradients:
                script.worst = max(script.worst, error_of([script.inner], [script.alone]))
            script.step()
        if script.kit.accelerator.sync_gradients:
            script.follow()
    return script.worst


def skips_all(kit: Kit) -> float:
    """skip_first_batches() of a whole epoch: it is empty, and the next ones are whole."""
    script, found = Script(kit()), []
    for epoch in range(3):
        loader = script.loader
        if epoch == 0:
            loader = script.kit.accelerator.skip_first_batches(loader, len(loader))
        found.append(0)
        for x, y in loader:
            script.kit.backward(plain(script.model, None, x, y))
            script.step()
            found[-1] += 1
    return 0.0 if found == [0, 3, 3] else 1.0


def late_scheduler(kit: Kit) -> float:
    """A scheduler that is made of the prepared optimizer."""
    script = Script(kit())
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, gamma=0.5)
    for batches, _ in script.rounds():
        script.kit.backward(plain(script.model, None, *batches[0]))
        script.optimizer.step()
        schedule.step()
        script.optimizer.zero_grad()
    return float(script.optimizer.param_groups[0]["lr"] != 0.01 * 0.5**3)


COMMON: dict[str, Callable[[Kit], float]] = {
    "plain loop": partial(trained, loss=plain),
    "micro-batches": partial(trained, loss=plain, parts=3),
    "class weights, ignore_index, a rank without targets": partial(trained, loss=by_classes),
    "the same, micro-batches": partial(trained, loss=by_classes, parts=2),
    "a mask": partial(trained, loss=masked),
    "two terms of unlike divisors": partial(trained, loss=two_terms),
    "two terms of unlike divisors, micro-batches": partial(trained, loss=two_terms, parts=2),
    "a loss that is a sum": partial(trained, loss=summed),
    "a penalty on weights": partial(trained, loss=penalized),
    "a gradient penalty": partial(trained, loss=gradient_penalty),
    "an auxiliary loss (MoE)": partial(trained, loss=balanced),
    "eval() in between": partial(trained, loss=eval_between),
    "two forwards, one loss": partial(trained, loss=two_forwards),
    "a bypassing forward": partial(trained, loss=lambda _, inner, x, y: mse(inner.encode(x), y)),
    "tied weights": partial(trained, loss=plain, model=Tied),
    "two models": two_models,
    "GAN, two optimizers": gan,
    "closures, two losses a step": closures,
    "SAM": sam,
    "own accumulation": own_accumulation,
    "own accumulation, divided": partial(own_accumulation, divided=2),
    "clipping": clipped,
    "UnevenSyncBatchNorm": sync_norm,
    "torch.compile": compiled,
    "activation checkpoints": checkpointed,
    "layers unfrozen later": unfrozen,
    "loss.backward()": past,
    "an epoch of no rounds": no_rounds,
}
OF_DDP: dict[str, Callable[[Kit], float]] = {"Join": joined, "batches as sampler=": sampler_of_samples}
OF_LIBRARIES: dict[str, Callable[[Kit], float]] = {
    "a sampler of its own": sampler_of_its_own,
    "a plan nothing uses": partial(sampler_of_its_own, plan=SPLIT),
    "a second shuffled loader": second_loader,
}
OF_ACCELERATE: dict[str, Callable[[Kit], float]] = {
    "tokens by a gathered count": recipe,
    "the same, not times the ranks": partial(recipe, ranks=1),
    "a rank without items": without_items,
    "accumulate() without a model": without_models,
    "skip_first_batches() of all": skips_all,
    "a scheduler made after prepare()": late_scheduler,
}
KITS: dict[str, tuple[Kit, dict[str, Callable[[Kit], float]]]] = {
    "DDP": (Plain, COMMON | OF_DDP),
    "FSDP2": (Sharded, COMMON),
    "Accelerate": (Accelerated, COMMON | OF_DDP | OF_LIBRARIES | OF_ACCELERATE),
    "Fabric": (Fabric, COMMON | OF_LIBRARIES),
}


def outcome(feature: Callable[[Any], float], kit: Any) -> float | str:
    """The error, or the message of what refused it."""
    try:
        return feature(kit)
    except InputError as error:
        return str(error)
    except (RuntimeError, TypeError) as error:  # of a library
        return " ".join(str(error).split())


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trainer, wanted = os.environ["TRAINER"], os.environ.get("FEATURES")
    if trainer in ("DDP", "FSDP2"):
        dist.init_process_group("gloo")
    kit: Any = None
    if trainer in KITS:
        kit, features = KITS[trainer]
    else:
        from trainer_cells_of_loops import LOOPS

        features = LOOPS[trainer]
    found = {name: outcome(features[name], kit) for name in (wanted.split("|") if wanted else features)}
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
