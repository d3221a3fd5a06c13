"""Features of trainers that own the loop, Lightning's and transformers', as trainer_cells tries them."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from trainer_checks import Model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pyps.torch.lightning import UnevenStrategy
from pyps.torch.transformers import UnevenTrainer

SAMPLES, IGNORED = 30, -100
RANKS = int(os.environ["WORLD_SIZE"])
mse = nn.functional.mse_loss
Loss = Callable[..., torch.Tensor]


class Seen:
    """The batches of a round, and the gradient of one process with those of all ranks."""

    def __init__(self, trained: nn.Module, loss: Loss) -> None:
        self.trained, self.alone, self.loss = trained, copy.deepcopy(trained), loss
        self.own: list[Any] = []
        self.worst = 0.0
        self.losses: list[float] = []

    def compare(self) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.own)
        self.own = []
        whole = [torch.cat(one) for one in zip(*(batch for own in every for batch in own), strict=True)]
        self.alone.load_state_dict(self.trained.state_dict())
        self.alone.zero_grad()
        loss = self.loss(self.alone, *whole)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(loss.item())
        every = zip(self.trained.parameters(), self.alone.parameters(), strict=True)
        pairs = [pair for pair in every if pair[0].requires_grad and pair[1].grad is not None]
        found, right = (
            torch.cat([(torch.zeros_like(p[k]) if p[k].grad is None else p[k].grad).flatten() for p in pairs])
            for k in (0, 1)
        )
        self.worst = max(self.worst, float((found - right).norm() / right.norm()))


class Module(lightning.LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.network = Model()
        self.loss = loss
        object.__setattr__(self, "seen", Seen(self.network, loss))

    def training_step(self, batch: Any, number: int) -> Any:
        batch = (
            batch if isinstance(batch[0], torch.Tensor) else [torch.cat(x) for x in zip(*batch, strict=True)]
        )
        self.seen.own.append(batch)
        return self.loss(self.network, *batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.compare()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def plain_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y)


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draws, dtype=torch.float64)
    y = torch.randn(SAMPLES, 3, generator=draws, dtype=torch.float64)
    return TensorDataset(x, y + torch.linspace(-2, 2, SAMPLES)[:, None])


def fitted(
    loss: Loss = plain_loss, parts: int = 1, kind: type[Module] = Module, loaders: Any = None, **more: Any
) -> float:
    torch.manual_seed(0)
    module = kind(loss)
    plan = more.pop("plan", [8 * parts, 4 * parts])
    trainer = lightning.Trainer(
        strategy=UnevenStrategy(process_group_backend="gloo", plan=plan, rebalance=False),
        accelerator="cpu",
        devices=RANKS,
        max_epochs=more.pop("max_epochs", 1),
        accumulate_grad_batches=parts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(module, loaders or DataLoader(dataset(), batch_size=6, shuffle=True))
    return module.seen.worst  # type: ignore[no-any-return]


class Manual(Module):
    """backward() twice a step, by hand: two optimizers of one module."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.seen.own.append(batch)
            self.manual_backward(self.loss(self.network, *batch))
            optimizer.step()
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = self.network.layers[0].parameters(), self.network.layers[2].parameters()
        return [torch.optim.SGD(own, lr=0.01) for own in parameters]


class Halves(Manual):
    """Its own accumulation."""

    def training_step(self, batch: Any, number: int) -> None:
        first, _ = self.optimizers()
        rows = len(batch[0]) // 2 * 2
        batch = [x[:rows] for x in batch]
        self.seen.own.append(batch)
        halves = list(zip(*(x.tensor_split(2) for x in batch), strict=True))
        with self.trainer.model.no_sync():
            self.manual_backward(self.loss(self.network, *halves[0]) / 2)
        self.manual_backward(self.loss(self.network, *halves[1]) / 2)
        first.step()
        self.zero_grad()


class Closures(Module):
    """LBFGS, which computes the loss several times a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.compare()
        self.seen.own.clear()

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen.own.clear()
        return super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Finetuning(BaseFinetuning):  # type: ignore[misc]
    """The first layer is frozen until the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.network.layers[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.network.layers[0], optimizer, lr=0.01)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([dataset()[k] for k in range(12)])


def with_balance(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y) + model.balance


def with_eval(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = mse(model(x), y)
    model.eval()
    model(x[:1])
    model.train()
    return found


def classes_of(y: torch.Tensor) -> torch.Tensor:
    """A class for each sample; some are ignored, and the last rank may have none."""
    return torch.where(y[:, 0] > 0.5, IGNORED, (y[:, 1] > 0).long())


def by_classes(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    return nn.functional.cross_entropy(model(x), classes_of(y), weight=weight)


def masked(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y[:, 0] > 0.3
    return (model(x)[kept] - y[kept]).square().sum() / (3 * int(kept.sum()))


def two_terms(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y) + by_classes(model, x, y)


def penalized(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(model(x), y) + 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def shuffled() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=6, shuffle=True)


LIGHTNING: dict[str, Callable[[Any], float]] = {
    "plain loop": lambda _: fitted(),
    "micro-batches": lambda _: fitted(parts=3),
    "two models": lambda _: fitted(lambda m, x, y: mse(m(x) + 0.5 * m.encode(-x), y)),
    "GAN, two optimizers": lambda _: fitted(kind=Manual),
    "a bypassing forward": lambda _: fitted(lambda m, x, y: mse(m.encode(x), y)),
    "an auxiliary loss (MoE)": lambda _: fitted(with_balance),
    "eval() in between": lambda _: fitted(with_eval),
    "two forwards, one loss": lambda _: fitted(lambda m, x, y: mse(m(x), y) + mse(m(x + 1), y)),
    "own accumulation": lambda _: fitted(kind=Halves),
    "clipping": lambda _: fitted(gradient_clip_val=100.0),
    "closures (LBFGS)": lambda _: fitted(kind=Closures),
    "layers unfrozen by BaseFinetuning": lambda _: fitted(callbacks=[Finetuning()], max_epochs=2),
    "class weights, ignore_index": lambda _: fitted(by_classes),
    "the same, micro-batches": lambda _: fitted(by_classes, parts=3),
    "a mask": lambda _: fitted(masked),
    "two terms of unlike divisors": lambda _: fitted(two_terms),
    "the same, micro-batches of two terms": lambda _: fitted(two_terms, parts=3),
    "a penalty on weights": lambda _: fitted(penalized),
    "a loss that is a sum": lambda _: fitted(lambda m, x, y: mse(m(x), y, reduction="sum")),
    "a second shuffled loader": lambda _: fitted(loaders=[shuffled(), shuffled()]),
    "a sampler of its own": lambda _: fitted(
        loaders=DataLoader(dataset(), batch_size=6, sampler=WeightedRandomSampler([1.0] * SAMPLES, 24)),
        plan=None,
    ),
    "a plan nothing uses": lambda _: fitted(
        loaders=DataLoader(dataset(), batch_size=6, sampler=WeightedRandomSampler([1.0] * SAMPLES, 24))
    ),
    "a stream": lambda _: fitted(loaders=DataLoader(Stream(), batch_size=3), plan=None),
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples by name."""

    def __init__(self, samples: list[dict[str, torch.Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def texts(ragged: bool = True) -> Rows:
    draws = torch.Generator().manual_seed(2)
    found = []
    for k in range(SAMPLES):
        words = torch.randint(20, (8,), generator=draws)
        labels = words.clone()
        if ragged:
            labels[1 + k % 7 :] = IGNORED
        found.append({"input_ids": words, "labels": labels})
    return Rows(found)


def classes() -> Rows:
    return Rows([{**one, "labels": one["input_ids"][0] % 3} for one in texts(False).samples])


def gpt() -> nn.Module:
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).double()  # type: ignore[no-any-return]


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.intermediate_size, config.max_position_embeddings = 16, 8
    return BertForSequenceClassification(config).double()  # type: ignore[no-any-return]


class Trained(UnevenTrainer):
    seen: Seen

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen.own.append([inputs["input_ids"], inputs["labels"]])
        return super().training_step(model, inputs, num_items_in_batch)


class MakesLoader(Trainer):  # type: ignore[misc]
    """Make a loader as ms-swift's trainers do, whose batches are cut by rank already."""

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        batches = [[k, k + 1] for k in range(0, SAMPLES, 2)][dist.get_rank() :: RANKS]
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)


class OwnLoader(Trained, MakesLoader):
    """Such a trainer, made uneven."""


class OwnLoss(Trained):
    """compute_loss as most write it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class OwnTokens(Trained):
    """The same for tokens, shifted by hand."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return tokens_loss(model, inputs["input_ids"], inputs["labels"])


class OwnItems(Trained):
    """Divided by num_items_in_batch, as one process would."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        scores = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = inputs["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(scores, targets, reduction="sum") / more["num_items_in_batch"]


class OwnCount(Trained):
    """A sum over this rank's own targets."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        scores = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = inputs["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(scores, targets, reduction="sum") / (targets != IGNORED).sum()


class Weighted(Trained):
    """Class weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return weighted_loss(model, inputs["input_ids"], inputs["labels"])


class Small(Trained):
    """Return what fits is less than the first batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.state.global_step == 1 and self.args.world_size * len(inputs["input_ids"]) > 10:
            self.seen.own = []
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(model, inputs, num_items_in_batch)


class OddLoss(Trained):
    """A mean over nothing that is known."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return tokens_loss(model, inputs["input_ids"], inputs["labels"]).square()


def tokens_loss(model: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=words).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), ignore_index=IGNORED)


def items_loss(model: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss as Trainer does: it counts labels, though a row's first is no target of a GPT-2."""
    scores = model(input_ids=words).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")
    return loss / (labels != IGNORED).sum()


def class_loss(model: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(input_ids=words).logits, labels)


def weighted_loss(model: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 7.0, 3.0], dtype=torch.float64)
    return nn.functional.cross_entropy(model(input_ids=words).logits, labels, weight=weight)


def smoothed_loss(model: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers' LabelSmoother, by the labels that Trainer counts."""
    logs = -model(input_ids=words).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    targets, kept = labels[:, 1:].flatten(), labels[:, 1:].flatten() != IGNORED
    right = logs[kept].gather(1, targets[kept][:, None]).sum()
    return (0.8 * right + 0.2 * logs[kept].sum() / logs.shape[1]) / (labels != IGNORED).sum()


class Compare(TrainerCallback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.compare()


def trained(
    kind: type[Trained],
    make: Callable[[], nn.Module],
    data: Any,
    loss: Loss,
    parts: int = 1,
    times: int = 1,
    **more: Any,
) -> float:
    """The worst gradient, or a part of training_loss's distance from the mean of one process's losses.

    times: calls of train().
    """
    torch.manual_seed(0)
    model = make()
    reported, plan = more.pop("reported", True), more.pop("plan", [8 * parts, 4 * parts])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=parts,
            num_train_epochs=1,
            learning_rate=0.01,
            max_grad_norm=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=100,
            optim="sgd",
            remove_unused_columns=False,
            **more,
        )
        trainer = kind(model, arguments, train_dataset=data, plan=plan, rebalance=False)
        seen = trainer.seen = Seen(model, loss)
        trainer.add_callback(Compare(seen))
        for _ in range(times):
            seen.losses = []
            found = trainer.train().training_loss
    right = sum(seen.losses) / len(seen.losses)
    return max(
        seen.worst, abs(found - right) / right / 1e6 if reported else 0.0
    )  # it is summed up in float32


class Words(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts().samples)


TRANSFORMERS: dict[str, Callable[[Any], float]] = {
    "plain loop": lambda _: trained(Trained, gpt, texts(), items_loss),
    "micro-batches": lambda _: trained(Trained, gpt, texts(), items_loss, parts=2),
    "a loss of the model's own": lambda _: trained(Trained, bert, classes(), class_loss),
    "the same, micro-batches": lambda _: trained(Trained, bert, classes(), class_loss, parts=2),
    "compute_loss, a mean": lambda _: trained(OwnLoss, bert, classes(), class_loss, parts=2),
    "compute_loss, over tokens": lambda _: trained(OwnTokens, gpt, texts(), tokens_loss, parts=2),
    "compute_loss, by items": lambda _: trained(OwnItems, gpt, texts(), items_loss, reported=False),
    "compute_loss, by an own count": lambda _: trained(OwnCount, gpt, texts(), tokens_loss, parts=2),
    "class weights, micro-batches": lambda _: trained(Weighted, bert, classes(), weighted_loss, parts=2),
    "label smoothing": lambda _: trained(
        Trained, gpt, texts(), smoothed_loss, parts=2, label_smoothing_factor=0.2, reported=False
    ),
    "train() twice": lambda _: trained(Trained, gpt, texts(), items_loss, times=2),
    "auto_find_batch_size": lambda _: trained(
        Small, gpt, texts(), items_loss, plan=None, auto_find_batch_size=True, reported=False
    ),
    "the same with a plan": lambda _: trained(Small, gpt, texts(), items_loss, auto_find_batch_size=True),
    "compute_loss, a mean of nothing known": lambda _: trained(OddLoss, gpt, texts(), tokens_loss),
    "tied weights": lambda _: trained(Trained, gpt, texts(False), items_loss),
    "a loader of the trainer's own": lambda _: trained(OwnLoader, bert, classes(), class_loss, parts=2),
    "a stream": lambda _: trained(Trained, gpt, Words(), tokens_loss, max_steps=3),
    "a sampler of its own": lambda _: trained(
        Trained, gpt, texts(), tokens_loss, train_sampling_strategy="group_by_length"
    ),
}
LOOPS = {"Lightning": LIGHTNING, "transformers": TRANSFORMERS}
