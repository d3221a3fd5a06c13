"""Reinforcement learning on unlike devices, with TRL's GRPO: torchrun --nproc-per-node 4 grpo.py

A prompt's completions are compared with each other, so a rank gets whole prompts: fast devices more of them.
The model is a small one made from a config, the reward counts a token; put your own in their place.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig

from pyps.torch.trl import UnevenGRPOTrainer  # was: from trl import GRPOTrainer

WORDS, GROUP, WANTED = 30, 4, 7


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({str(word): word for word in range(WORDS)}, unk_token="0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="1", pad_token="2", padding_side="left")


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    return GPT2LMHeadModel(config)


def prompts(count: int = 64) -> list[dict[str, str]]:
    """Different ones, of two to four words."""
    words = [[3 + k % 25, 3 + k // 25, *([5] * (k % 3))] for k in range(count)]
    return [{"prompt": " ".join(map(str, row))} for row in words]


def reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object
) -> list[float]:
    """How much of a completion is the wanted token."""
    return [ids.count(WANTED) / max(1, len(ids)) + 0.01 * len(set(ids)) for ids in completion_ids]


def main() -> None:
    arguments = GRPOConfig(
        output_dir="out",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=8,
        num_train_epochs=8,
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
    )
    run = UnevenGRPOTrainer(
        network(),
        reward,
        arguments,
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
    )
    run.train()
    if run.is_world_process_zero():
        figures = [entry for entry in run.state.log_history if "reward" in entry]
        print(f"prompts {run.run.sampler.split}", f"reward {figures[-1]['reward']:.3f}")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
