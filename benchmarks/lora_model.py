"""What benchmarks/lora_link.py fine-tunes: a small GPT that knows Python's sources, on its documentation.

Both are on every machine with Python. The base is trained here, on the sources of the library, and written to
a file that each process reads (BASE); a LoRA adapter, or all of it, then learns the documentation's text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "local_steps"))
from text import LETTERS, load

CONTEXT = 33  # characters of a sequence
HELD_OUT = 256  # sequences
LINEAR = ["c_attn", "c_proj", "c_fc"]
LORA = LoraConfig(r=2, lora_alpha=8, target_modules=LINEAR, fan_in_fan_out=True, task_type="CAUSAL_LM")
BASE_STEPS, BASE_BATCH, BASE_LR = 300, 32, 3e-3


def network() -> GPT2LMHeadModel:
    """The base, untrained: 417,408 parameters, and 8,192 of an adapter."""
    config = GPT2Config(vocab_size=LETTERS, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def make_base(path: Path) -> float:
    """Train the base and write it; its last loss."""
    torch.manual_seed(0)
    sources, model = load()[0][:, :CONTEXT], network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, BASE_LR, total_steps=BASE_STEPS)
    loss = torch.zeros(())
    for _ in range(BASE_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, sources[torch.randint(len(sources), (BASE_BATCH,))])
        loss.backward()
        optimizer.step()
        rates.step()
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items() if not tied(name)}, path
    )
    return float(loss.detach())


def tied(name: str) -> bool:
    """Whether a tensor is another one again."""
    return name == "lm_head.weight"


def model_of(seed: int, full: bool = False) -> torch.nn.Module:
    """The base with an adapter of this seed; or `full`, all of which is trained."""
    base = network()
    base.load_state_dict(load_file(os.environ["BASE"]), strict=False)
    torch.manual_seed(seed)
    return base if full else get_peft_model(base, LORA)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """(to train on, held out), int64 [n, CONTEXT]; characters as in the sources."""
    letters = np.full(256, LETTERS - 1, np.int64)
    letters[32:127] = np.arange(95)
    letters[ord("\n")] = 95
    whole = "".join(topics[name] for name in sorted(topics)).encode("latin-1", "replace")
    text = letters[np.frombuffer(whole, np.uint8)]
    count = len(text) // CONTEXT
    parts = text[: count * CONTEXT].reshape(count, CONTEXT)
    order = np.random.default_rng(0).permutation(count)
    return torch.from_numpy(parts[order[HELD_OUT:]]), torch.from_numpy(parts[order[:HELD_OUT]])


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each next character. rows: int64 [n, CONTEXT]."""
    return model(input_ids=rows, labels=rows).loss
