"""Nested state as JSON and tensors: what a state_dict holds, without pickle.

Tensors go to a flat dict under a name that says where they were; tuples, and dicts with keys that are no
text, are marked. Numbers are exact in both directions.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pyps.errors import InputError
from pyps.formats.files import open_plain

TENSOR, TUPLE, ITEMS, COUNTER, NUMBER = "tensor", "tuple", "items", "counter", "number"  # of a marked value
MARK = "$"
STATE = "state"  # in a file's metadata


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON's types; its tensors are added to `tensors`, each under `name` and its place.

    Raises InputError, naming the place, for what is neither a tensor nor a number, text, list, tuple or dict.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {MARK: TENSOR, "name": name, "shape": list(value.shape)}
    if isinstance(value, int | float | np.number):
        return _number(value)
    if isinstance(value, list | tuple):
        items = [pack(item, f"{name}.{k}", tensors) for k, item in enumerate(value)]
        return items if isinstance(value, list) else {MARK: TUPLE, "items": items}
    if isinstance(value, Mapping):
        return _mapping(value, name, tensors)
    if isinstance(value, np.ndarray):
        return pack(torch.from_numpy(value.copy()), name, tensors)
    raise InputError("save", name, type(value).__name__, "tensors, numbers, text, lists, tuples and dicts")


def _number(value: Any) -> Any:
    plain = value.item() if isinstance(value, np.number) else value
    if isinstance(plain, int) and -(2**63) <= plain < 2**63:
        return plain
    if isinstance(plain, float) and np.isfinite(plain):
        return plain
    return {MARK: NUMBER, "text": repr(plain)}


def _mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) for key in value) and MARK not in value and not isinstance(value, Counter):
        return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
    items = [[pack(k, name, tensors), pack(v, f"{name}.{k}", tensors)] for k, v in value.items()]
    return {MARK: COUNTER if isinstance(value, Counter) else ITEMS, "items": items}


def for_file(value: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, and the rest as metadata, of a safetensors file. Raises InputError as pack."""
    tensors: dict[str, torch.Tensor] = {}
    packed = msgspec.json.encode(pack(value, "state", tensors)).decode()
    return _apart(tensors), {STATE: packed}


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous, and no two in one memory, which safetensors refuses."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        place = own.untyped_storage().data_ptr()
        found[name] = own.clone() if place in seen else own
        seen.add(place)
    return found


def from_file(path: str | os.PathLike[str], expected: str) -> Any:
    """The value of a file of for_file(). Raises InputError for another one; `expected`: what it should be."""
    open_plain(path, expected).close()
    try:
        with safe_open(path, "pt") as file:
            packed = msgspec.json.decode((file.metadata() or {})[STATE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, msgspec.DecodeError, RecursionError) as error:
        raise InputError(os.fspath(path), "", str(error).lower(), expected) from None
    return unpack(packed, tensors, os.fspath(path))


def unpack(packed: Any, tensors: Mapping[str, torch.Tensor], where: str = "state") -> Any:
    """The value that was packed, with the tensors of that name. Raises InputError, naming `where`."""
    try:
        return _unpacked(packed, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise InputError(where, "state", f"{type(error).__name__}: {error}", "a packed state") from None


def _unpacked(packed: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpacked(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed.get(MARK)
    if kind is None:
        return {key: _unpacked(item, tensors) for key, item in packed.items()}
    if kind == TENSOR:
        found = tensors[packed["name"]]
        return found if list(found.shape) == packed["shape"] else found.reshape(packed["shape"])
    if kind == NUMBER:
        text = packed["text"]
        return int(text) if text.lstrip("-").isdigit() else float(text)
    if kind == TUPLE:
        return tuple(_unpacked(item, tensors) for item in packed["items"])
    items = {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in packed["items"]}
    return Counter(items) if kind == COUNTER else items


def names_in(packed: Any) -> dict[str, tuple[int, ...]]:
    """The names of the tensors that a packed value refers to, with their shapes."""
    if isinstance(packed, dict) and packed.get(MARK) == TENSOR:
        return {packed["name"]: tuple(packed["shape"])}
    items = packed if isinstance(packed, list) else packed.values() if isinstance(packed, dict) else ()
    return {name: shape for item in items for name, shape in names_in(item).items()}


def join_shared(packed: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Tied tensors, such as an embedding that is an output layer too, stay once, under their first name."""
    first: dict[Any, str] = {}
    joined: dict[str, str] = {}
    for name, tensor in list(tensors.items()):
        own = getattr(tensor, "_local_tensor", tensor)
        place = own.data_ptr() if own.numel() else id(own), own.dtype, own.shape, own.stride()
        if first.setdefault(place, name) != name:
            joined[name] = first[place]
            del tensors[name]
    if joined:
        _rename(packed, joined)


def _rename(packed: Any, names: Mapping[str, str]) -> None:
    if isinstance(packed, dict) and packed.get(MARK) == TENSOR:
        packed["name"] = names.get(packed["name"], packed["name"])
        return
    items = packed if isinstance(packed, list) else packed.values() if isinstance(packed, dict) else ()
    for item in items:
        _rename(item, names)
