"""ShardingAccelerator: an Accelerator, Trainer's own, too, whose prepare() keeps shares of a run's states.

With stage=3 it shards models in place of DDP. Optimizers that were made before get this rank's pieces. State
dicts are whole, so checkpoints are those of a run without shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, clean_state_dict_for_safetensors
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from pyps.errors import InputError
from pyps.sharding import load_state_dict, whole_state_dict
from pyps.sharding.modules import run_of, shard_blocks, take_pieces, unit_of
from pyps.sharding.state import TensorPart
from pyps.torch.adapter import UnevenRun

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ShardingAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator with the shares of `run`, if it has some. Raises InputError for stage=3 under
    torch.compile.
    """

    run: UnevenRun

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        is_trained = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if self.num_processes > 1 and self.run.stage == 3 and is_trained and unit_of(model) is None:
            if self.state.dynamo_plugin.backend != DynamoBackend.NO:
                raise InputError(
                    "shares", "torch.compile", "on", "off: shard() gathers blocks as they compute"
                )
            low = LOW.get(self.mixed_precision)
            policy = low and MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
            shard_blocks(model, self.run.shares, device=self.device, mp_policy=policy)
            for one in self._optimizers:  # that were prepared before
                take_pieces(one.optimizer)
        if unit_of(model) is not None:
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if self.num_processes > 1 and self.run.shares is not None:
            self.run.shard(optimizer)
            device_placement = False  # its state is with its parameters
        found = super().prepare_optimizer(optimizer, device_placement)
        if self.run.stage == 3:
            take_pieces(found.optimizer)
        return found

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if unit_of(model) is None:
            with super().no_sync(model):
                yield
            return
        own = run_of(model)  # each pass is reduced, and adds up on the owners
        own.ends_round = False
        try:
            yield
        finally:
            own.ends_round = True

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if unit_of(model) is None:
            return super().get_state_dict(model, unwrap)
        found = whole_state_dict(model)
        return found if unwrap else clean_state_dict_for_safetensors(found)  # save_state() does not


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
