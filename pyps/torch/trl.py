"""UnevenGRPOTrainer: TRL's GRPOTrainer with prompts for each rank by its device, and one process's gradient.

    trainer = UnevenGRPOTrainer(model, reward, arguments, train_dataset=prompts)     # was GRPOTrainer(...)
    class Mine(UnevenPrompts, RLOOTrainer): ...                                      # for RLOO

The unit of the split is a prompt: all of its completions are generated, rewarded, compared and trained on one
rank. So advantages need no other rank, and each rank works alone until its gradients are reduced. TRL itself
gathers equally many rows of each rank there; within alone() Accelerate takes this process for a single one.

What the loss is a mean over is known by its type: completions, or their tokens; DAPO's kind is divided by the
tokens of all ranks. Figures that TRL logs are put together when they are logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from pyps.errors import InputError
from pyps.torch.schedule import micro_batches
from pyps.torch.transformers import UnevenTraining

BY_TOKENS = ("bnpo",)  # loss types: a mean over a micro-batch's tokens
BY_ITEMS = ("cispo", "dapo", "vespo")  # divided by the tokens of all ranks
PLAIN = {  # what would compare or average rows of several ranks
    "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "multi_objective_aggregation": "sum_then_normalize",
    "normalize_advantages": False,
}


class UnevenPrompts(UnevenTraining):
    """A mix-in that stands before TRL's GRPOTrainer or RLOOTrainer among a class's bases.

    plan, profile, max_batch count prompts. All else is as in UnevenTraining. Raises InputError for a stream,
    completions that serve several optimizer steps, rewards scaled over the batch, entropy terms, an auxiliary
    loss and vLLM's server mode.
    """

    _slices: Any = None  # the generated completions of a round, in micro-batches
    _sliced_at = -1  # the micro-batch, counted from the beginning, at which they were generated
    _counted: Any = None  # the micro-batch that the loss is of
    _apart: Any = None  # the group in which tokens are summed: apart, so that it counts as no meeting

    def _uneven_order(self: Any) -> dict[str, Any]:
        args = self.args
        if not hasattr(self.train_dataset, "__len__"):
            raise InputError("UnevenPrompts", "train_dataset", "a stream", "a data set with a length")
        passes = args.steps_per_generation * self.num_iterations
        if passes != args.gradient_accumulation_steps:
            found = f"{args.steps_per_generation} times {self.num_iterations} micro-batches"
            expected = f"{args.gradient_accumulation_steps}, gradient_accumulation_steps: one step each"
            raise InputError("UnevenPrompts", "steps_per_generation, num_iterations", found, expected)
        return {
            "total": args.generation_batch_size // self.num_generations,
            "shuffle": self.shuffle_dataset,
            "drop_last": True,
            "group": self.num_generations,
        }

    def _check(self: Any) -> None:
        super()._check()
        for name, plain in PLAIN.items():
            found = getattr(self.args, name, plain)
            if found != plain:
                expected = f"{plain!r}: each rank sees its own rows"
                raise InputError("UnevenPrompts", name, repr(found), expected)
        if getattr(self, "scale_rewards", "group") == "batch":
            expected = "group or none: each rank sees its own rows"
            raise InputError("UnevenPrompts", "scale_rewards", "'batch'", expected)
        if getattr(self, "aux_loss_enabled", False):
            raise InputError("UnevenPrompts", "router_aux_loss_coef", "an auxiliary loss", "none")
        if getattr(self.args, "use_vllm", False) and self.args.vllm_mode == "server":
            expected = "colocate: a server takes equally many prompts of all ranks"
            raise InputError("UnevenPrompts", "vllm_mode", "'server'", expected)

    def _uneven_backward(self: Any, inner: Any, loss: Any, **options: Any) -> None:
        run, loss_type = partial(inner, **options), getattr(self, "loss_type", "")
        if self.run.sampler is None:
            run(loss)
        elif loss_type in BY_ITEMS:  # TRL has multiplied it by the ranks
            self._part = loss.detach()
            self.run.backward(loss * (1 / self.args.world_size), run, is_part=True)
        else:
            count = _tokens if loss_type in BY_TOKENS else _completions
            self.run.backward(loss, run, self.current_gradient_accumulation_steps, count(self._counted))

    def _prepare_inputs(self: Any, rows: Any) -> Any:
        """A micro-batch of the completions of these prompts, which the first one of a round generates."""
        if self.run.sampler is None or not self.model.training:
            return super()._prepare_inputs(rows)  # type: ignore[misc]
        parts = self.args.steps_per_generation
        place = self._step % parts
        if self._slices is None or (place == 0 and self._sliced_at != self._step):
            self._sliced_at = self._step
            made = split_pixel_values_by_grid(self._generate_and_score_completions(rows))
            made = shuffle_sequence_dict(made)
            cuts = micro_batches(0, _completions(made), parts)
            self._slices = [unsplit_pixel_values_by_grid(_rows(made, *ends)) for ends in cuts]
        return self._slices[place]

    def _generate_and_score_completions(self: Any, rows: Any) -> Any:
        score = super()._generate_and_score_completions  # type: ignore[misc]
        if self.run.sampler is None or not self.model.training:
            return score(rows)
        before = self.state.num_input_tokens_seen
        with alone(self.accelerator):
            made = score(rows)
        items = made.get("num_items_in_batch", torch.zeros((), device=self.accelerator.device))
        seen = torch.as_tensor(self.state.num_input_tokens_seen - before, device=items.device)
        both = self._sum(torch.stack([items.double(), seen.double()]))
        if "num_items_in_batch" in made:
            made["num_items_in_batch"] = both[0].to(items.dtype)
        self.state.num_input_tokens_seen = before + int(both[1])
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        return made

    def _sum(self: Any, values: torch.Tensor) -> torch.Tensor:
        """Over all ranks; the wait for them is none of this rank's own time."""
        if self._apart is None:
            self._apart = dist.new_group()
        mean = self.run.mean
        with nullcontext() if mean is None else mean.waiting.counted():
            dist.all_reduce(values, group=self._apart)
        return values

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        if self.run.sampler is None or not self.model.training:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        self._counted = inputs
        with alone(self.accelerator):
            return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does. Figures of training are all ranks': least, greatest, or means by completions."""
        mine = self._metrics["train"]
        if self.run.sampler is not None and self.model.training and mine:
            every: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(every, (self.run.sampler.batch, dict(mine)))
            for name in mine:
                found = [(batch, theirs[name]) for batch, theirs in every if name in theirs]
                mine[name] = _together(name, found)
        super().log(logs, start_time)  # type: ignore[misc]


@contextmanager
def alone(accelerator: Any) -> Iterator[None]:
    """Within it, Accelerate gathers nothing, and this process is the first; the number of ranks stays."""
    states = [PartialState(), accelerator.state]
    before = [(state.distributed_type, state.process_index) for state in states]
    try:
        for state in states:
            state.distributed_type, state.process_index = DistributedType.NO, 0
        yield
    finally:
        for state, (kind, index) in zip(states, before, strict=True):
            state.distributed_type, state.process_index = kind, index


def _rows(batch: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    """Some rows of each sequence; numbers as they are."""

    def cut(value: Any) -> Any:
        is_one = value is None or (isinstance(value, torch.Tensor) and value.dim() == 0)
        return value if is_one else value[low:high]

    return {name: cut(value) for name, value in batch.items()}


def _completions(batch: Mapping[str, Any]) -> int:
    return len(batch["completion_ids"])


def _tokens(batch: Mapping[str, Any]) -> Any:
    """The tokens of a micro-batch's completions that the loss is a mean over."""
    mask = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).sum()


def _together(name: str, found: list[tuple[int, list[float]]]) -> list[float]:
    """A figure's values, one by one, of the ranks that have it: (their share, their values)."""
    columns = zip(*(values for _, values in found), strict=False)
    if name.endswith(("min", "min_length", "min_terminated_length")):
        return [min(column) for column in columns]
    if name.endswith(("max", "max_length", "max_terminated_length")):
        return [max(column) for column in columns]
    shares = [share for share, _ in found]
    return [sum(s * v for s, v in zip(shares, column, strict=True)) / sum(shares) for column in columns]


class UnevenGRPOTrainer(UnevenPrompts, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer on unlike devices; with one process it is a plain one."""
