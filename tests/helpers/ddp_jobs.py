"""Define what the ranks of the DDP tests do: each function runs on all ranks of a group, with the same
arguments.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch import UnevenBatchSampler, weighted_hook
from pyps.torch.exchange import quantized_sum
from pyps.torch.schedule import micro_batches
from pyps.worker.quantize import INT4, INT8

TOKENS, WORDS, IGNORED = 6, 11, -100
Model = nn.Module


def net(dtype: torch.dtype = torch.float32, width: int = 32) -> Model:
    torch.manual_seed(0)
    layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    return nn.Sequential(*layers).to(DEVICE, dtype)


class Speaker(nn.Module):
    """Tokens [n, TOKENS] -> the mean cross entropy of targets, those that are IGNORED left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.out(torch.tanh(self.embed(words)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def numbers(seed: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a whole round, the same on all ranks; the ranks' parts differ a lot."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=draws, dtype=torch.float64)
    targets = (
        torch.randn(count, 4, generator=draws, dtype=torch.float64) + torch.linspace(-2, 2, count)[:, None]
    )
    return inputs.to(DEVICE, dtype), targets.to(DEVICE, dtype)


def words(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and targets of a round; how many of a row count grows with the row."""
    draws = torch.Generator().manual_seed(seed)
    texts, targets = torch.randint(WORDS, (2, count, TOKENS), generator=draws).unbind()
    counted = torch.linspace(0.1, 1, count)[:, None]
    targets = torch.where(torch.rand(count, TOKENS, generator=draws) < counted, targets, IGNORED)
    return texts.to(DEVICE), targets.to(DEVICE)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten().cpu() for t in tensors])


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative distance."""
    return float((found - right).norm() / right.norm())


def mine(batches: list[int], group: dist.ProcessGroup) -> slice:
    rank = dist.get_rank(group)
    return slice(sum(batches[:rank]), sum(batches[: rank + 1]))


def backward(ddp: Any, loss: Callable[..., torch.Tensor], batch: Any, parts: int, hook: Any) -> None:
    """The gradient of a mean over a batch, in `parts` micro-batches of which the last one reduces."""
    count = len(batch[0])
    for number, (low, high) in enumerate(micro_batches(0, count, parts)):
        last = number == parts - 1
        with nullcontext() if last else ddp.no_sync():
            found = loss(ddp, *(x[low:high] for x in batch))
            share = (high - low) / count if hook is None else hook.share(high - low, count)
            (found * share).backward()


def square(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def gradient_errors(
    group: dist.ProcessGroup,
    batches: list[int],
    options: dict[str, Any],
    parts: list[int] | None = None,
    ddp_options: dict[str, Any] | None = None,
    backend: str = "",
) -> tuple[list[float], list[float]]:
    """By round, how far the hook's gradient and plain DDP's are from that of one process with all samples.

    In the third round batches change places, in the fourth they are larger.
    """
    alone = net()
    weighted = DistributedDataParallel(copy.deepcopy(alone), process_group=group, **(ddp_options or {}))
    plain = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(weighted, **options)
    trained: Any = torch.compile(weighted, backend=backend) if backend else weighted
    part = parts[dist.get_rank(group)] if parts else 1
    longer = [batch + 7 * k + 3 for k, batch in enumerate(batches)]
    errors: tuple[list[float], list[float]] = ([], [])
    for number, split in enumerate((batches, batches, batches[1:] + batches[:1], longer)):
        whole = numbers(number, sum(split))
        own = tuple(x[mine(split, group)] for x in whole)
        right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        both = (weighted, trained, hook, errors[0]), (plain, plain, None, errors[1])
        for model, run, shares, into in both:
            model.zero_grad()
            if part == 1:
                square(run, *own).backward()
            else:
                backward(run, square, own, min(part, len(own[0])), shares)
            into.append(off(flat(p.grad for p in model.parameters()), right))
    return errors


def compiled_errors(
    group: dist.ProcessGroup, batches: list[int], ddp_options: dict[str, Any], backend: str, folder: str
) -> tuple[list[float], list[float]]:
    """The same with a compiled model; what the compiler writes goes to the folder, by its own threads."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._dynamo.reset()
    try:
        return gradient_errors(group, batches, {}, None, ddp_options, backend)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def trained_apart(group: dist.ProcessGroup, batches: list[int], steps: int) -> float:
    """How far the parameters are from those of one process after `steps` steps with momentum, in fp64."""
    alone, together = net(torch.float64), net(torch.float64)
    ddp = DistributedDataParallel(together, process_group=group)
    weighted_hook(ddp)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, together)]
    for step in range(steps):
        whole = numbers(step, sum(batches), torch.float64)
        for optimizer, model, batch in (
            (optimizers[0], alone, whole),
            (optimizers[1], ddp, tuple(x[mine(batches, group)] for x in whole)),
        ):
            optimizer.zero_grad()
            square(model, *batch).backward()
            optimizer.step()
    return off(flat(together.parameters()), flat(alone.parameters()))


def token_errors(group: dist.ProcessGroup, batches: list[int], said: bool) -> list[float]:
    """The same for a loss that is a mean over targets, weighted by them: counted from forward(), or said."""
    torch.manual_seed(0)
    alone = Speaker().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    hook = weighted_hook(ddp, count=None if said else lambda texts, targets: (targets != IGNORED).sum())
    errors = []
    for number in range(4):
        whole = words(number, sum(batches))
        if number >= 2:  # no rank has a target, then the first rank has none
            whole[1][: sum(batches) if number == 2 else batches[0]] = IGNORED
        own = [x[mine(batches, group)] for x in whole]
        right = flat(torch.autograd.grad(alone(*whole), list(alone.parameters())))
        ddp.zero_grad()
        loss = ddp(*own)
        if said:
            hook.set_weight((own[1] != IGNORED).sum())
        loss.backward()
        if number == 2:
            assert all(p.grad is None or not p.grad.any() for p in ddp.parameters())
            continue
        errors.append(off(flat(p.grad for p in ddp.parameters()), right))
    return errors


def feedback_left(
    group: dist.ProcessGroup, batches: list[int], wire: Any, reload: bool
) -> tuple[float, float, float]:
    """After 6 rounds: how far sent + kept is from put in; the same without kept; the share of fp32's bytes.

    Buckets are small and cut anew after the first round; with `reload`, another hook goes on from the state.
    """
    alone = net(width=300)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group, bucket_cap_mb=0.1)
    hook = weighted_hook(ddp, wire=wire)
    sent = put_in = torch.zeros(1)
    for number in range(6):
        whole = numbers(number, sum(batches))
        put_in = put_in + flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
        ddp.zero_grad()
        square(ddp, *(x[mine(batches, group)] for x in whole)).backward()
        sent = sent + flat(p.grad for p in ddp.parameters())
        if reload and number == 2:
            state = copy.deepcopy(hook.state_dict())
            ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group, bucket_cap_mb=0.2)
            hook = weighted_hook(ddp, wire=wire)
            hook.load_state_dict(state)
    residuals = hook.state_dict()["residuals"]
    kept = flat(residuals[name] for name, _ in alone.named_parameters()).to(DEVICE)
    dist.all_reduce(kept, group=group)
    return (
        off(sent + kept.cpu(), put_in),
        off(sent, put_in),
        hook.gradient_bytes.sent / hook.gradient_bytes.fp32,
    )


def one_bad_value(group: dist.ProcessGroup, bits: int) -> tuple[int, bool, bool]:
    """Rank 1 holds a NaN in block 1: how many sums are NaN, all in that block, and the same on all ranks."""
    codec = INT8 if bits == 8 else INT4
    values = torch.randn(2000, generator=torch.Generator().manual_seed(dist.get_rank(group))).to(DEVICE)
    if dist.get_rank(group) == 1:
        values[codec.block + 3] = torch.nan
    total, _, _ = quantized_sum(codec, values, group)
    bad = total.isnan()
    copies: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(copies, total.nan_to_num(7), group=group)
    inside = bool(bad[codec.block : 2 * codec.block].all())
    return int(bad.sum()), inside, all(torch.equal(c, copies[0]) for c in copies)


def checked(group: dist.ProcessGroup, planned: list[int], batches: list[int], draws: bool = False) -> str:
    """Return what the hook says of a first round of other batches than the sampler's, which may have
    drawn.
    """
    sampler = UnevenBatchSampler(sum(planned) * 3, planned, dist.get_rank(group))
    if draws:
        next(iter(sampler))
    ddp = DistributedDataParallel(net(), process_group=group)
    weighted_hook(ddp, sampler)
    try:
        square(ddp, *(x[mine(batches, group)] for x in numbers(0, sum(batches)))).backward()
    except (InputError, RuntimeError) as error:
        return str(error)
    return "as planned"


def kept_after_a_bad_step(group: dist.ProcessGroup) -> bool:
    """Return whether a step with an infinite loss on one rank leaves the kept errors as they were."""
    ddp = DistributedDataParallel(net(), process_group=group)
    hook = weighted_hook(ddp, wire="int8")
    inputs, targets = numbers(dist.get_rank(group), 5)
    square(ddp, inputs, targets).backward()
    before = {name: values.clone() for name, values in hook.state_dict()["residuals"].items()}
    (square(ddp, inputs, targets) * (torch.inf if dist.get_rank(group) == 1 else 1)).backward()
    after = hook.state_dict()["residuals"]
    return all(torch.equal(values, after[name]) for name, values in before.items())


def sparse_errors(group: dist.ProcessGroup, batches: list[int], steps: int) -> list[float]:
    """How far gradients of embeddings, which are sparse, are from those of one process, by step."""
    net = nn.Embedding(40, 3, sparse=True).to(DEVICE, torch.float64)
    nn.init.ones_(net.weight)
    ddp = DistributedDataParallel(copy.deepcopy(net), process_group=group)
    weighted_hook(ddp)
    texts, errors = words(0, sum(batches))[0] % 40, []
    for _ in range(steps):
        ddp.zero_grad()
        net.zero_grad()
        (ddp(texts[mine(batches, group)]) ** 3).mean().backward()
        (net(texts) ** 3).mean().backward()
        found, right = (one.weight.grad.to_dense() for one in (ddp.module, net))
        errors.append(off(flat([found]), flat([right])))
    return errors


class OfTwoTypes(nn.Module):
    """Parameters in float32 and in float64, which DDP reduces in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4).double()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(inputs)).double())


def errors_in_another_ddp(group: dist.ProcessGroup, batches: list[int]) -> list[float]:
    """How far the gradient of a module is off that was frozen in part, and goes into DDP again with all."""
    alone = net(torch.float64)
    module = copy.deepcopy(alone)
    whole = numbers(0, sum(batches), torch.float64)
    own = tuple(x[mine(batches, group)] for x in whole)
    right = flat(torch.autograd.grad(square(alone, *whole), list(alone.parameters())))
    errors = []
    for trains in (False, True):
        module[0].requires_grad_(trains)
        ddp = DistributedDataParallel(module, process_group=group)
        weighted_hook(ddp)
        for _ in range(2):
            module.zero_grad()
            square(ddp, *own).backward()
            trained = [p for p in module.parameters() if p.requires_grad]
            found = flat(p.grad for p in trained)
            errors.append(off(found, right[-len(found) :]))
    return errors


def two_types_errors(
    group: dist.ProcessGroup, batches: list[int], ddp_options: dict[str, Any]
) -> tuple[list[float], int]:
    """How far the gradient is from that of one process, by round; and how many rounds were ready."""
    torch.manual_seed(0)
    alone = OfTwoTypes().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group, **ddp_options)
    hook, counted, errors = weighted_hook(ddp), list[int](), list[float]()
    hook.on_ready.append(lambda: counted.append(1))
    for number in range(3):
        inputs, targets = numbers(number, sum(batches))
        own = mine(batches, group)
        for model, rows in ((alone, slice(None)), (ddp, own)):
            model.zero_grad()
            square(model, inputs[rows], targets[rows].double()).backward()
        errors.append(off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in alone.parameters())))
    return errors, len(counted)


class Caching(nn.Module):
    """Texts [n, words] -> scores [n, 4], and keys and values by word, as models of transformers give them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(WORDS, 8), nn.Linear(8, 4)

    def forward(self, texts: torch.Tensor) -> dict[str, Any]:
        found = self.words(texts)
        return {"logits": self.scores(found.sum(1)), "past_key_values": ((2 * found, 3 * found),)}


def error_with_a_cache(group: dist.ProcessGroup, batches: list[int], lengths: list[int]) -> float:
    """How far the gradient is for texts that each rank pads to a length of its own."""
    torch.manual_seed(0)
    alone = Caching().to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(alone), process_group=group)
    weighted_hook(ddp)
    texts = [torch.randint(WORDS, pair).to(DEVICE) for pair in zip(batches, lengths, strict=True)]
    targets = numbers(0, sum(batches))[1]
    scores = torch.cat([alone(part)["logits"] for part in texts])
    nn.functional.mse_loss(scores, targets).backward()
    found = ddp(texts[dist.get_rank(group)])["logits"]
    nn.functional.mse_loss(found, targets[mine(batches, group)]).backward()
    return off(flat(p.grad for p in ddp.parameters()), flat(p.grad for p in alone.parameters()))
