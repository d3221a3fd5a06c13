"""Ranks of UnevenGRPOTrainer: each step's gradient and that of one process, for each type of loss in LOSSES.
Then what is refused, one line each.

One process: the completions of all ranks, advantages by the formula from the rewards of each prompt's group,
and the loss by its definition. A prompt's completions must all be of one rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "fine_tune"))
from grpo import GROUP, network, prompts, reward, tokenizer

from pyps.errors import InputError
from pyps.torch.trl import UnevenGRPOTrainer

KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
REFUSED: tuple[
    dict[str, Any], ...
] = (  # what would compare or average rows of several ranks, or serve several steps
    {"num_iterations": 2},
    {"steps_per_generation": 4},
    {"scale_rewards": "batch"},
    {"top_entropy_quantile": 0.5},
    {"multi_objective_aggregation": "normalize_then_sum"},
)


class Compared(TrainerCallback):  # type: ignore[misc]
    """At each step: the gradient of all ranks' completions, by the model alone."""

    def __init__(self, run: UnevenGRPOTrainer) -> None:
        self.run, self.alone, self.own = run, network(), []
        self.worst, self.steps, self.rows = 0.0, 0, set()
        compute = run.compute_loss

        def noted(model: Any, inputs: Any, **more: Any) -> Any:
            self.own.append({name: inputs[name].clone() for name in KEPT})
            return compute(model, inputs, **more)

        run.compute_loss = noted

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.own)
        self.own = []
        self.rows.add(tuple(sum(len(one["advantages"]) for one in own) for own in every))
        for own in every:
            check_groups(own)
        batches = [batch for own in every for batch in own]
        self.alone.load_state_dict(self.run.model.state_dict())
        self.alone.zero_grad()
        loss_of(self.alone, batches, self.run.loss_type, self.run.max_completion_length).backward()
        pairs = list(zip(self.run.model.parameters(), self.alone.parameters(), strict=True))
        found, right = (torch.cat([pair[k].grad.flatten() for pair in pairs]) for k in (0, 1))
        right = right * min(1.0, self.run.args.max_grad_norm / float(right.norm()))  # Trainer clips
        self.worst = max(self.worst, float((found - right).norm() / right.norm()))
        self.steps += 1


def check_groups(batches: list[Any]) -> None:
    """All completions of each prompt are here, and their advantages are those of this group's rewards."""
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for batch in batches:
        for k in range(len(batch["advantages"])):
            prompt = tuple(batch["prompt_ids"][k][batch["prompt_mask"][k].bool()].tolist())
            text = batch["completion_ids"][k][batch["completion_mask"][k].bool()].tolist()
            points = reward([], [], [text])[0]
            groups.setdefault(prompt, []).append((points, float(batch["advantages"][k])))
    for prompt, found in groups.items():
        assert len(found) == GROUP, f"prompt {prompt} has {len(found)} completions here"
        points = torch.tensor([one[0] for one in found])
        expected = (points - points.mean()) / (points.std() + 1e-4)
        assert torch.allclose(expected, torch.tensor([one[1] for one in found]), atol=1e-4)


def loss_of(model: Any, batches: list[Any], loss_type: str, longest: int) -> torch.Tensor:
    """Return the loss of completions that the model itself has just made: the ratio of probabilities is 1."""
    sums, tokens = [], []
    for batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        count = batch["completion_ids"].shape[1]
        logits = logits[:, -count:].log_softmax(-1)
        logs = logits.gather(-1, batch["completion_ids"][..., None])[..., 0]
        ratio = torch.exp(logs - logs.detach())
        own = -ratio * batch["advantages"][:, None] * batch["completion_mask"]
        sums.append(own.sum(1))
        tokens.append(batch["completion_mask"].sum(1))
    each, lengths = torch.cat(sums), torch.cat(tokens)
    if loss_type == "grpo":
        return (each / lengths.clamp(min=1)).mean()
    if loss_type == "dr_grpo":
        return each.sum() / (len(each) * longest)
    return each.sum() / lengths.sum()  # bnpo and dapo


def trained(loss_type: str, plan: list[int] | None, folder: str, **more: Any) -> Compared:
    options = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        loss_type=loss_type,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=6,
        max_steps=4,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **more,
    )
    run = UnevenGRPOTrainer(
        network(),
        reward,
        options,
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
        plan=plan,
        rebalance=plan is None,
    )
    seen = Compared(run)
    run.add_callback(seen)
    run.train()
    return seen


def main() -> None:
    for loss_type in os.environ["LOSSES"].split():
        seen = trained(loss_type, [6, 2], os.environ["OUT"])
        if dist.get_rank() == 0:
            last = seen.run.state.log_history[-2]
            print(loss_type, f"{seen.worst:.3g}", seen.steps, sorted(seen.rows), round(last["num_tokens"]))
    for more in REFUSED:
        try:
            trained("grpo", [6, 2], os.environ["OUT"], **more)
        except InputError as error:
            if dist.get_rank() == 0:
                print("refused", *more, error)


main()
dist.destroy_process_group()
