"""Checkpoints of a DDP or FSDP2 run: saved by all ranks together, loaded by as many ranks or by others.

    if (state := pyps.torch.load("checkpoints", model, optimizer, sampler, mean=mean)) is not None: ...
    ...
    pyps.torch.save("checkpoints", model, optimizer, sampler, mean=mean)

The tensors are written by torch.distributed.checkpoint, as safetensors; everything else is in
checkpoint.json. Random states, a GlobalMean's residuals and a Rebalancer's measurements belong to a rank:
they are loaded where there are as many ranks as before. With as many ranks a run goes on bit for bit; with
int8 and int4 from its second step on, because DDP cuts its final buckets then. Of FSDP2's parameters
each rank writes its own shards and reads those that it needs: other numbers of ranks, or DDP, can go on from
them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.nn.parallel import DistributedDataParallel

from pyps.agreement.consensus import DEADLINE_SECONDS, Consensus
from pyps.checkpoint.folder import (
    KEEP,
    MANIFEST,
    fill_folder,
    find_checkpoint,
    newest_checkpoint,
    verify_folder,
)
from pyps.checkpoint.tensors import sync_file, write_error
from pyps.errors import InputError
from pyps.formats.checkpoint import Checkpoint
from pyps.sharding import load_state_dict
from pyps.sharding.state import STEP, Owned, TensorPart, gathered_wholes, parts_of
from pyps.sharding.state_dicts import owned_by, pieces_state
from pyps.torch.global_mean import GlobalMean
from pyps.torch.noise import GradientNoise
from pyps.torch.peers import DTensor, is_divided, parameters_of
from pyps.torch.rebalance import Rebalancer
from pyps.torch.rounds import Rounds
from pyps.worker.local.packing import join_shared, names_in, pack, unpack

NOISE = "noise.json"  # in the folder of all checkpoints
OF_A_RANK = (GlobalMean, Rebalancer)  # what has a state of its own on each rank
TORCH = "2.9"
AFTER_COLLECTIVES_SECONDS = 0.01
dcp: Any = torch.distributed.checkpoint  # its types name none of what is used here
T = TypeVar("T")
ParameterShards = DTensor | Owned


def save(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sampler: Rounds | None = None,
    *,
    rounds: int | None = None,
    step: int | None = None,
    keep: int = KEEP,
    group: dist.ProcessGroup | None = None,
    **state: Any,
) -> Path:
    """Write a checkpoint and remove all but the last `keep`; its folder. Every rank calls it between steps.

    folder: of the checkpoints, seen by all ranks. model, optimizer: those of the run; a DDP model's names are
    those of the module in it. sampler: an UnevenBatchSampler or UnevenIterableDataset. rounds: the rounds of
    this epoch that were trained; by default those whose steps have ended. step: the checkpoint's number,
    rising; by default the samples trained. group: of the ranks; by default all. state: more to save by name:
    objects with state_dict() (a GlobalMean, a Rebalancer, a scheduler, a GradScaler), or numbers, text, lists
    and dicts of them; a GradientNoise also writes noise.json there, for pyps-plan. Raises InputError
    on all ranks if it cannot be written, and the last one stays; and for a tensor-parallel model in DDP, of
    whose parameters each rank has a part without a name.
    """
    _check_torch()
    _meet("save", state, group)
    _refuse_divided(model)
    number = step if step is not None else _samples(sampler, rounds)
    tensors: dict[str, torch.Tensor] = {}
    common: dict[str, Any] = {
        "model": pack(_model_state(_plain_module(model)), "model", tensors),
        "optimizer": pack(_optimizer_state(optimizer, group), "optimizer", tensors),
    }
    join_shared(common, tensors)
    _prepare_parts(tensors)
    if sampler is not None:
        done = trained_rounds(sampler, rounds)
        common |= {"sampler": sampler.state_dict(done), "changes": sampler.changes(done)}
    given, ranks = _states(state, model, tensors, group)

    def fill(temporary: Path) -> Checkpoint:
        _broadcast(str(temporary), group)
        _write(temporary, tensors, group)
        return Checkpoint(
            made_with=metadata.version("pyps-train"),
            unix_seconds=time.time(),
            version=number,
            state={"common": common | given, "ranks": ranks},
            files={path.name: sync_file(path) for path in sorted(temporary.iterdir())},
        )

    def write() -> Path:
        written = fill_folder(Path(folder), number, fill, keep)
        for noise in (value for value in state.values() if isinstance(value, GradientNoise)):
            noise.save(Path(folder) / NOISE)
        return written

    written = _first_rank(write, tensors, group)
    # Gloo's threads drop the last collective's tensors, for which they need the GIL. If the script ends just
    # then, they cannot have it, and abort the process (torch 2.13).
    time.sleep(AFTER_COLLECTIVES_SECONDS)
    return written


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state; tied parts are one object, also where they are empty."""
    state, first = model.state_dict(), dict[Owned, TensorPart]()
    return {n: first.setdefault(v.owned, v) if isinstance(v, TensorPart) else v for n, v in state.items()}


def _prepare_parts(tensors: dict[str, torch.Tensor]) -> None:
    """Let parts be those of vectors, of which a file of safetensors holds one; a tensor whose memory is not
    by rows is gathered.
    """
    for name, part in tensors.items():
        if isinstance(part, TensorPart):
            one, piece = part.owned, part.as_subclass(torch.Tensor)
            whole = None if one.is_by_rows else gathered_wholes(one.flat, {one.k: piece})
            tensors[name] = TensorPart.as_vector(one, piece) if whole is None else whole(one.k)


def _optimizer_state(optimizer: torch.optim.Optimizer | None, group: dist.ProcessGroup | None) -> Any:
    """Its state; None without one. What a ZeroRedundancyOptimizer's ranks have apart, the first rank has
    then, which writes it.
    """
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if optimizer is None:
        return None
    if owned := owned_by(optimizer):
        return parts_of(pieces_state(optimizer), owned)
    if consolidate is not None:
        consolidate(to=0)
        if dist.get_rank(group) != 0:
            return None
    return optimizer.state_dict()


def _states(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, Any], list[Any]]:
    """Return what the script gave to save, and its tensors into `tensors`: what all ranks have alike, and of
    each rank its own, its random numbers too.
    """
    rank, common = dist.get_rank(group), dict[str, Any]()
    own: dict[str, Any] = {"random": pack(_random_states(_gpu_of(model)), f"rank{rank}.random", tensors)}
    for name, value in state.items():
        plain = value.state_dict() if hasattr(value, "state_dict") else value
        if isinstance(value, OF_A_RANK):
            own[name] = pack(plain, f"rank{rank}.{name}", tensors)
        else:
            common[f"state.{name}"] = pack(plain, f"state.{name}", tensors)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    return common, ranks


def load(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sampler: Rounds | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    **state: Any,
) -> dict[str, Any] | None:
    """Load the newest checkpoint of a folder, or the one given, on all ranks; None if there is none yet.

    The arguments are those of save(): what has a state_dict() gets its state. The dict has all else, by name,
    and the checkpoint's number as "step". Call it before the first step. The split of the checkpoint is taken
    if there are as many ranks as before and B is the same. Raises InputError on all ranks for a damaged file,
    for another model, and for a state that the checkpoint does not have.
    """
    _check_torch()
    _meet("load", state, group)
    found = _agreed(lambda: _find(Path(folder)), group)
    if found is None:
        return None
    path, manifest = found
    with _describing(path):
        common, ranks = manifest.state["common"], manifest.state["ranks"]
        same_ranks = len(ranks) == dist.get_world_size(group)
        own = ranks[dist.get_rank(group)] if same_ranks else {}
        shards = _shards(_plain_module(model), optimizer)
        tensors = _read(path, names_in(common) | names_in(own), shards, group)
        where = str(path)
        _load_model(where, _plain_module(model), unpack(common["model"], tensors))
        if optimizer is not None:
            _load_optimizer(where, optimizer, unpack(common["optimizer"], tensors))
        if sampler is not None:
            sampler.load_state_dict(common.get("sampler", {}))
            sampler.take_changes(common["changes"])
        rest = {
            name.removeprefix("state."): value for name, value in common.items() if name.startswith("state.")
        }
        for name, value in state.items():
            if not hasattr(value, "load_state_dict") and name in rest:
                continue  # numbers, text, lists and dicts: the caller gets them
            packed = own.get(name) if isinstance(value, OF_A_RANK) else rest.pop(name, None)
            if packed is not None:
                value.load_state_dict(unpack(packed, tensors))
            elif same_ranks or not isinstance(value, OF_A_RANK):
                raise InputError(where, name, "nothing", f"a state that was saved as {name}=")
        if same_ranks:
            random_states, gpu = unpack(own["random"], tensors), _gpu_of(model)
            _set_random_states(random_states, gpu)
            if sampler is not None and sampler.position:  # a DataLoader draws a number before it goes on
                sampler.before_pass = partial(_set_random_states, random_states, gpu)
        return {name: unpack(value, tensors) for name, value in rest.items()} | {"step": manifest.version}


@contextlib.contextmanager
def _describing(path: Path) -> Iterator[None]:
    """Raise what a state of wrong types or shapes leads to, as an InputError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(str(path), "state", repr(error), "that of pyps.torch.save") from error


def _meet(call: str, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise InputError where a rank does not make the call that all of them have to."""
    means = [value for value in state.values() if isinstance(value, GlobalMean)]
    if means:
        means[0].meet(f"pyps.torch.{call}()")
    else:
        Consensus(f"pyps.torch.{call}", group, DEADLINE_SECONDS)


def _check_torch() -> None:
    if not hasattr(dcp, "HuggingFaceStorageWriter"):
        raise InputError("pyps.torch.save", "torch", torch.__version__, f"torch {TORCH} or newer")


def _refuse_divided(model: torch.nn.Module) -> None:
    """Raise InputError where DDP has parts of parameters, which have the same name on each of the ranks."""
    while (inner := getattr(model, "_orig_mod", None)) is not None:
        model = inner
    if any(is_divided(parameter) for parameter in parameters_of(model)):
        found = "a tensor-parallel one in DistributedDataParallel"
        raise InputError("pyps.torch.save", "model", found, "one that went through fully_shard")


def _plain_module(model: Any) -> Any:
    """The module in DDP and torch.compile's wrappers, so that names do not depend on them."""
    while (is_ddp := isinstance(model, DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model.module if is_ddp else model._orig_mod
    return model


def trained_rounds(sampler: Rounds, rounds: int | None) -> int:
    """The rounds of this pass that count as trained; rounds: the caller's word.

    Raises InputError if no step of a pass that was read has ended, as in a loop that calls none.
    """
    if rounds is not None:
        return rounds
    if sampler.has_read() and not sampler.trained and not sampler.passes:
        expected = "a step that ends: step(), Rebalancer.step() or GlobalMean.end_step()"
        raise InputError("pyps.torch.save", "rounds", "batches that were computed, and no step", expected)
    return sampler.trained


def _samples(sampler: Rounds | None, rounds: int | None) -> int:
    length = getattr(sampler, "length", None)
    if sampler is None or length is None:
        raise InputError("pyps.torch.save", "step", "nothing", "the checkpoint's number")
    state = sampler.state_dict(trained_rounds(sampler, rounds))
    return int(state["epoch"]) * int(length) + int(state["position"])


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """All ranks write their tensors and shards; the first one those tensors that all have."""
    flat = {
        name: tensor if isinstance(tensor, DTensor | TensorPart) else tensor.contiguous().reshape(-1)
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(flat, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        needed = sum(tensor.nbytes for tensor in flat.values())
        raise write_error(folder, first if isinstance(first, Exception) else error, needed) from None


def _first_rank(
    write: Callable[[], Path], tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Path:
    """The first rank writes, and announces where; the others write their tensors there. Errors reach all."""

    def whole() -> Path:
        try:
            return write()
        finally:
            _broadcast(None, group)

    if dist.get_rank(group) != 0:
        while (place := _broadcast(None, group)) is not None:
            with contextlib.suppress(InputError):  # the first rank has it, too
                _write(Path(place), tensors, group)
    return _agreed(whole, group)


def _agreed(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return on all ranks what the function gives on the first; so is an InputError that it raises. For any
    other error, which the first rank raises, the other ranks raise an InputError, so that none waits.
    """
    found: tuple[Any, tuple[str, str, str, str] | None] = None, None
    unknown: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            found = function(), None
        except InputError as error:
            found = None, (error.where, error.field, error.found, error.expected)
        except Exception as error:
            unknown, found = error, (None, ("checkpoint", "the first rank", repr(error), "no error there"))
    value, failed = _broadcast(found, group)
    if unknown is not None:
        raise unknown
    if failed is not None:
        raise InputError(*failed)
    return value  # type: ignore[no-any-return]


def _broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's value, on all ranks."""
    values = [value]
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(values, src=first, group=group)
    return values[0]


def _find(folder: Path) -> tuple[Path, Checkpoint] | None:
    given = newest_checkpoint(folder)
    if given is None and not (folder / MANIFEST).exists():
        return None
    path = given or find_checkpoint(folder)
    manifest = verify_folder(path)
    if {"common", "ranks"} - manifest.state.keys():
        raise InputError(str(path / MANIFEST), "state", "that of a store", "that of pyps.torch.save")
    return path, manifest


def _shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, ParameterShards]:
    """By the beginning of a tensor's name in a checkpoint, the shards that it belongs to."""
    state = model.state_dict().items()
    found: dict[str, Any] = {f"model.{name}": getattr(value, "owned", value) for name, value in state}
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    found |= {f"optimizer.state.{k}": parameter for k, parameter in enumerate(parameters)}
    found |= {f"optimizer.state.{k}": one for k, one in (owned_by(optimizer) if optimizer else {}).items()}
    return {name: value for name, value in found.items() if isinstance(value, DTensor | Owned)}


def _read(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    shards: Mapping[str, ParameterShards],
    group: dist.ProcessGroup | None,
) -> dict[str, torch.Tensor]:
    """The tensors of these names and shapes; of those that are like one of `shards`, this rank's shards."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        size, dtype = (known[name].size, known[name].properties.dtype) if name in known else ((0,), None)
        like, size = _like(name, shape, shards), torch.Size(size)
        if isinstance(like, Owned) and (like.shape == size or like.is_by_rows):
            piece = torch.empty(like.piece.shape, dtype=dtype)
            is_whole = like.shape == size
            tensors[name] = TensorPart.of(like, piece) if is_whole else TensorPart.as_vector(like, piece)
        elif isinstance(like, DTensor) and like.shape == size:
            tensors[name] = torch.empty_like(like, dtype=dtype)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    dcp.load(wanted, storage_reader=reader, process_group=group)
    return {name: _as_shards(tensor, _like(name, shapes[name], shards)) for name, tensor in tensors.items()}


def _like(name: str, shape: tuple[int, ...], shards: Mapping[str, ParameterShards]) -> ParameterShards | None:
    """The parameter of this name, or whose optimizer state has it, if that has the shape."""
    of, _, last = name.rpartition(".")
    found = shards.get(name) if name in shards or last == STEP else shards.get(of)
    return found if found is not None and tuple(found.shape) == shape else None


def _as_shards(tensor: torch.Tensor, like: ParameterShards | None) -> torch.Tensor:
    """A whole tensor of a DDP run as this rank's shards, where the model has such."""
    if like is None or isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, Owned):
        is_part = isinstance(tensor, TensorPart)
        piece = tensor if is_part else like.cut_parameter(like.name, tensor.reshape(like.shape))
        return TensorPart.of(like, piece)
    whole = tensor.reshape(like.shape).to(like.device)
    from torch.distributed.tensor import distribute_tensor  # torch 2.4 has it elsewhere

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _load_model(where: str, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    own = model.state_dict()
    for name in [*own, *state]:
        here, there = (_described(values.get(name)) for values in (own, state))
        if here != there:
            raise InputError(where, name, f"{there} in the checkpoint", f"{here}, as in the model")
    model.load_state_dict(state)


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _load_optimizer(where: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    if state is None:
        raise InputError(where, "optimizer", "nothing", "an optimizer's state")
    try:
        load_state_dict(optimizer, state)
    except (ValueError, KeyError) as error:
        expected = f"that of a {type(optimizer).__name__} with these groups"
        raise InputError(where, "optimizer", f"another state ({error})", expected) from None


def _gpu_of(model: torch.nn.Module) -> torch.device | None:
    """The GPU whose random numbers the model takes; None on a CPU without one."""
    if not torch.cuda.is_available():
        return None
    current = torch.device("cuda", torch.cuda.current_device())
    return next((p.device for p in model.parameters() if p.device.type == "cuda"), current)


def _random_states(gpu: torch.device | None) -> dict[str, Any]:
    """Return those of torch, NumPy and Python in this process."""
    kind, keys, *rest = np.random.get_state()
    states = {"torch": torch.get_rng_state(), "numpy": (kind, np.asarray(keys, np.int64), *rest)}
    if gpu is not None:
        states["cuda"] = torch.cuda.get_rng_state(gpu)
    return {**states, "python": random.getstate()}


def _set_random_states(states: Mapping[str, Any], gpu: torch.device | None) -> None:
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    if "cuda" in states and gpu is not None:
        torch.cuda.set_rng_state(states["cuda"], gpu)
