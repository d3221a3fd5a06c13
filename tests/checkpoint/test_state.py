"""A store's state on file: what comes back is what there was, and a worker goes on from it bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_tools import OPTIMIZERS, SAMPLES, X, Y, backward, loss_of, make_model

import pyps
from pyps.checkpoint.folder import checkpoints
from pyps.checkpoint.state import load, save
from pyps.errors import InputError
from pyps.native.state import StoreState
from pyps.native.values import Hyper, Optimizer
from pyps.store.policies import ASP, DSSP, R2SP, SSP

SOME = np.random.default_rng(0)


def flat(values: object) -> dict[str, bytes]:
    """Nested dicts of arrays with one name for each, as bytes."""
    if isinstance(values, np.ndarray):
        return {"": values.tobytes()}
    assert isinstance(values, dict)
    return {f"{k}/{name}": data for k, v in values.items() for name, data in flat(v).items()}


def check_equal(found: StoreState, state: StoreState) -> None:
    assert found.header == state.header
    for field in ("parameters", "vectors", "residuals"):
        assert flat(dict(getattr(found, field))) == flat(dict(getattr(state, field)))


def pushed(name: str, optimizer: str, policy: object, codec: str, pushes: int) -> StoreState:
    """The state of a store with several tensors after some pushes, one claim still out."""
    shapes = {"a": (3, 2), "b.weight": (70_000,), "c": ()}
    tensors = {key: SOME.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    tensors["mean"] = np.zeros(4, np.float32)
    options = {"groups": {"b.weight": 1, "mean": 2}, "averaged": ["mean"], "samples": 1000}
    with pyps.Store.create(
        name, tensors, batches=[7], optimizer=optimizer, policy=policy, **options
    ) as store:
        store.join(0)
        for _ in range(pushes):
            claim = store.start()
            staging = store.stage()
            staging.flat[:] = SOME.standard_normal(staging.flat.size)
            encoding = {"encoding": pyps_encoding(codec)} if codec else {}
            store.push(staging, claim.count, Hyper(lr=0.1, betas=(0.5, 0.9)), **encoding)
        store.start()
        return store.state()


def pyps_encoding(codec: str) -> object:
    from pyps.store.codec import as_codec, fed_back

    return fed_back(as_codec(codec))


@pytest.mark.parametrize("optimizer", [o.name.lower() for o in Optimizer])
@pytest.mark.parametrize(("policy", "codec"), [(None, ""), (R2SP(), "int8"), (SSP(bound=4), "int4")])
def test_every_state_comes_back(
    shm: Path, tmp_path: Path, optimizer: str, policy: object, codec: str
) -> None:
    state = pushed("state", optimizer, policy, codec, 3)
    assert bool(state.residuals) is bool(codec)
    path = save(state, tmp_path, policy="bsp", seed=2**63 - 1)
    saved = load(tmp_path)
    check_equal(saved.state, state)
    assert (saved.path, saved.checkpoint.version) == (path, state.header.version)
    with pyps.Store.create("again", state=saved.state) as store:
        check_equal(store.state(), replace(state, header=store.state().header))


def test_numbers_of_any_size_come_back(shm: Path, tmp_path: Path) -> None:
    state = pushed("state", "sgd", ASP(), "", 0)
    words = st.integers(0, 2**64 - 1)

    @given(st.lists(words, min_size=16, max_size=16), st.lists(st.tuples(words, words)), st.floats(0, 1e300))
    @settings(max_examples=15, deadline=None)
    def check(policy: list[int], ranges: list[tuple[int, int]], lr: float) -> None:
        hyper = (None, Hyper(lr=lr), None)
        header = replace(state.header, policy_state=tuple(policy), ranges=tuple(ranges), hyper=hyper)
        save(replace(state, header=header), tmp_path)
        check_equal(load(tmp_path).state, replace(state, header=header))

    check()


def test_no_checkpoint_has_parameters_that_are_not_finite(shm: Path, tmp_path: Path) -> None:
    state = pushed("state", "sgd", None, "", 1)
    save(state, tmp_path)
    for bad in (math.nan, math.inf, -math.inf):
        parameters = {**state.parameters, "a": np.array([[1, 2], [bad, 4], [5, 6]], np.float32)}
        header = replace(state.header, version=9)
        with pytest.raises(InputError, match="a: found values that are not finite"):
            save(replace(state, header=header, parameters=parameters), tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["000000001"]


def test_large_parameters_are_finite(shm: Path, tmp_path: Path) -> None:
    state = pushed("state", "sgd", None, "", 1)
    parameters = {**state.parameters, "a": np.full((3, 2), 3e38, np.float32)}
    assert load(save(replace(state, parameters=parameters), tmp_path)).state.parameters["a"][0, 0] > 2e38


def test_a_name_that_the_file_format_keeps_is_refused(shm: Path, tmp_path: Path) -> None:
    with pyps.Store.create("state", {"__metadata__": np.ones(2)}, batches=[4]) as store:
        state = store.state()
    with pytest.raises(InputError, match="found a tensor named '__metadata__'"):
        save(state, tmp_path)
    assert not checkpoints(tmp_path)


def train_some(
    name: str, kind: str, steps: int, resume: Path | None = None, codec: str = "f32"
) -> tuple[dict[str, torch.Tensor], StoreState]:
    """A worker's model after so many steps, and the store's state after a step more was claimed."""
    model = make_model(seed=0 if resume is None else 3)
    with pyps.join(name, 0, batches=[7], samples=3 * SAMPLES, seed=5, codec=codec) as worker:
        worker.attach(model, OPTIMIZERS[kind](model), resume=resume)
        batches = worker.batches((X, Y))
        for _ in range(steps):
            x, y = next(batches)
            backward(loss_of(model, x, y))
            worker.step()
        state = worker.store.state()
        return worker.state_dict(), state


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_worker_goes_on_bit_for_bit(shm: Path, tmp_path: Path, kind: str) -> None:
    """Another model's parameters do not matter; the optimizer's constants are the script's."""
    codec = "int8" if kind == "adam" else "f32"
    whole, _ = train_some("whole", kind, 11, codec=codec)
    _, state = train_some("first", kind, 5, codec=codec)
    save(state, tmp_path, seed=5)
    rest, end = train_some("second", kind, 6, tmp_path, codec)
    assert end.header.samples_assigned == 11 * 7
    for name, value in whole.items():
        assert torch.equal(value, rest[name]), name


def test_what_does_not_fit_is_refused(shm: Path, tmp_path: Path) -> None:
    _, state = train_some("first", "adamw", 2)
    path = save(state, tmp_path, seed=5)
    with pytest.raises(InputError, match="optimizer: found sgd"):
        train_some("second", "sgd", 1, tmp_path)
    model = torch.nn.Linear(6, 2)
    with pyps.join("third", 0, batches=[7], seed=5) as worker, pytest.raises(InputError, match=r"tensors\["):
        worker.attach(model, torch.optim.AdamW(model.parameters()), resume=tmp_path)
    model = make_model()
    words = f"seed: found 6; expected 5, as in {path}"
    with pyps.join("fourth", 0, batches=[7], seed=6) as worker, pytest.raises(InputError, match=words):
        worker.attach(model, torch.optim.AdamW(model.parameters()), resume=tmp_path)


def test_a_state_without_what_its_header_names_is_refused(shm: Path, tmp_path: Path) -> None:
    from pyps.formats.checkpoint import signed

    path = save(pushed("state", "adamw", None, "", 1), tmp_path)
    manifest = json.loads((path / "checkpoint.json").read_text())
    for change, words in (
        ({"shape": [2, 3]}, r"a: found float32 \[3, 2\]; expected float32 \[2, 3\]"),
        ({"name": "z"}, "z: found nothing"),
        ({"group": "x"}, "checkpoint.json: state: found Expected `int`"),
    ):
        raw = json.loads(json.dumps(manifest))
        raw["state"]["tensors"][0] |= change
        fake = msgspec.convert({**raw, "sha256": "0" * 64}, load(tmp_path).checkpoint.__class__)
        (path / "checkpoint.json").write_bytes(msgspec.json.encode(signed(fake)))
        with pytest.raises(InputError, match=words):
            load(tmp_path)
        (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert load(tmp_path).checkpoint.version == 1


def test_the_policies_words_may_be_of_another_run(shm: Path, tmp_path: Path) -> None:
    save(pushed("state", "sgd", DSSP(), "", 2), tmp_path)
    with pyps.Store.create("again", state=load(tmp_path).state, policy=SSP(bound=3), batches=[4, 4]) as store:
        assert (store.status().version, store.layout.ranks) == (2, 2)
