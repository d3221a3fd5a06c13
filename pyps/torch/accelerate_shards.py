"""shard() under an Accelerator, Trainer's own, too: prepare() shards models in place of DDP.

Optimizers that were made before get this rank's pieces. State dicts are whole, so checkpoints are those of a
run without shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, clean_state_dict_for_safetensors
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from pyps.errors import InputError
from pyps.sharding import load_state_dict, whole_state_dict
from pyps.sharding.modules import run_of, shard_blocks, take_pieces, unit_of
from pyps.sharding.state import TensorPart
from pyps.torch.adapter import UnevenRun

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard_models(accelerator: Any, run: UnevenRun) -> None:
    """Let an Accelerator's prepare() shard the models that train. Raises InputError for torch.compile."""
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise InputError("shares", "torch.compile", "on", "off: shard() gathers blocks as they compute")
    prepare_model, prepare_optimizer = accelerator.prepare_model, accelerator.prepare_optimizer
    no_sync, get_state_dict = accelerator.no_sync, accelerator.get_state_dict
    low = LOW.get(accelerator.mixed_precision)
    policy = None if low is None else MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)

    def with_pieces(*objects: Any, **options: Any) -> Any:
        found = prepare_optimizer(*objects, **options)
        take_pieces(found.optimizer)
        return found

    def sharded(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if unit_of(model) is None:
            if evaluation_mode or not any(p.requires_grad for p in model.parameters()):
                return prepare_model(model, device_placement, evaluation_mode)
            shard_blocks(model, run.shares, device=accelerator.device, mp_policy=policy)
            for one in accelerator._optimizers:  # that were prepared before
                take_pieces(one.optimizer)
        return prepare_model(model, device_placement=False, evaluation_mode=True)

    @contextmanager
    def held_back(model: Any) -> Iterator[None]:
        if unit_of(model) is None:
            with no_sync(model):
                yield
            return
        own = run_of(model)  # each pass is reduced, and adds up on the owners
        own.ends_round = False
        try:
            yield
        finally:
            own.ends_round = True

    def whole(model: Any, unwrap: bool = True) -> Any:
        if unit_of(model) is None:
            return get_state_dict(model, unwrap)
        found = whole_state_dict(model)
        return found if unwrap else clean_state_dict_for_safetensors(found)  # save_state() does not

    accelerator.prepare_model, accelerator.prepare_optimizer = sharded, with_pieces
    accelerator.no_sync, accelerator.get_state_dict = held_back, whole


def load_weights(model: torch.nn.Module, folder: Path, number: int) -> None:
    """Load what save_state() has written of a model that is sharded, of which tied names may be left out."""
    end = f"_{number}" if number else ""
    path = folder / f"model{end}.safetensors"
    if path.exists():
        state = load_file(path)
    else:
        state = torch.load(folder / f"pytorch_model{end}.bin", map_location="cpu", weights_only=True)
    parts = {name: part for name, part in model.state_dict().items() if isinstance(part, TensorPart)}
    known = {parts[name].owned: value for name, value in state.items() if name in parts}
    tied = {name: known[part.owned] for name, part in parts.items() if part.owned in known}
    load_state_dict(model, tied | state)
