"""Gradients that travel while backward goes on: what arrives is what is there at the end, encoded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE, needs_cuda
from torch import nn
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model

from pyps.errors import InputError
from pyps.native.values import PushRequest, PushResult, Tensor
from pyps.store.codec import Codec, Encoding, encode
from pyps.worker.device import binding
from pyps.worker.device.buckets import GradientBuckets, PinnedMemory, buckets_of
from pyps.worker.device.bus import Bus, CudaBus
from pyps.worker.step.loop import join
from pyps.worker.step.step import Step
from pyps.worker.step.transport import Transport

ELEMENTS = 2048


def layers(sizes: tuple[int, ...] = (100, 700, 300, 5)) -> list[tuple[nn.Parameter, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    found, offset = [], 0
    for k, size in enumerate(sizes):
        p = nn.Parameter(torch.randn(size, generator=draws))
        found.append((p, Tensor(f"p{k}", (size,), 0, offset, size)))
        offset += size
    return found


def flat_gradient(parameters: list[tuple[nn.Parameter, Tensor]]) -> torch.Tensor:
    flat = torch.zeros(ELEMENTS)
    for p, t in parameters:
        if p.grad is not None:
            flat[t.offset : t.offset + t.elements] = p.grad.cpu()
    return flat


def backward_of(parameters: list[tuple[nn.Parameter, Tensor]], unused: int | None = None) -> None:
    used = [p for k, (p, _) in enumerate(parameters) if k != unused]
    backward(sum(((p * p).sum() * (k + 1) for k, p in enumerate(used)), torch.zeros(())))


def test_buckets_cover_every_parameter_once() -> None:
    parameters = layers()
    buckets = buckets_of(parameters, ELEMENTS, 512)
    assert [(b.first, b.end) for b in buckets] == [(0, 512), (512, 1024), (1024, 1536)], "not the empty one"
    covered = sorted((part.lo, part.hi) for b in buckets for part in b.parts)
    assert covered == [(0, 100), (100, 512), (512, 800), (800, 1024), (1024, 1100), (1100, 1105)]


def test_gradients_travel_during_backward_and_changed_ones_again() -> None:
    parameters = layers()
    buckets = GradientBuckets(parameters, ELEMENTS, Bus(), size=512)
    to = torch.zeros(ELEMENTS)
    for unused in (None, 2):
        buckets.begin(to)
        backward_of(parameters, unused)
        assert all(b.shipped is None for b in buckets._buckets), "more micro-batches follow"
        buckets.last_backward()
        backward_of(parameters, unused)
        shipped = [b.shipped is not None for b in buckets._buckets]
        assert shipped == ([True] * 3 if unused is None else [True, False, False]), "those with all gradients"
        nn.utils.clip_grad_norm_([p for p, _ in parameters], 0.5)
        buckets.finish()
        assert torch.equal(to, flat_gradient(parameters))
        for p, _ in parameters:
            p.grad = None
    buckets.begin(to)
    buckets.finish()
    assert not to.any(), "no gradient counts as zero"
    buckets.close()
    backward_of(parameters)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("size", [256, 1024, 1 << 21])
@pytest.mark.parametrize("pushed", [True, False])
def test_what_is_encoded_on_the_way_is_the_c_codecs(codec: Codec, size: int, pushed: bool) -> None:
    """With error feedback over steps, one of which is not admitted, or was given up before its push, and a
    scale that changes in the end.
    """
    parameters = layers()
    buckets = GradientBuckets(parameters, ELEMENTS, Bus(), codec, size=size)
    residual, left = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    for step in range(4):
        buckets.begin(torch.zeros(0))
        buckets.last_backward(0.25)
        backward_of(parameters)
        scale = 0.25 if step != 2 else 0.5
        buckets.finish(scale)
        expected, _ = encode(
            flat_gradient(parameters).numpy(),
            Encoding(codec),
            scale=scale,
            residual=residual,
            residual_out=left,
        )
        np.testing.assert_array_equal(buckets.codes, expected)
        if pushed or step != 1:
            buckets.commit_residual(admitted=step != 1)
        if step != 1:
            residual, left = left, residual
        with torch.no_grad():
            for p, _ in parameters:
                p.sub_(0.01 * p.grad if p.grad is not None else 0.0)
                p.grad = None
    buckets.close()


def trained(policy: str, codec: str, micro_batch: int | None) -> bytes:
    """The parameters of a run in bfloat16, which is copied to its staging buffer even on a CPU."""
    model = make_model().bfloat16()
    with join(
        "run",
        0,
        batches=[10],
        samples=3 * SAMPLES,
        seed=5,
        policy=policy,
        codec=codec,
        micro_batch=micro_batch,
    ) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in worker.batches((X.bfloat16(), Y.bfloat16())):
            backward(loss_of(model, x, y))
            worker.step()
        assert worker.steps == 18
        return worker.store.pull()[0].tobytes()


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize(("policy", "codec"), [("bsp", "int8"), ("asp", "int4"), ("r2sp", "int8")])
def test_a_run_that_encodes_on_the_device_is_bitwise_one_that_does_not(
    shm: Path, monkeypatch: pytest.MonkeyPatch, policy: str, codec: str, micro_batch: int | None
) -> None:
    monkeypatch.setattr(binding, "ENCODES_ON", ())
    plain = trained(policy, codec, micro_batch)
    monkeypatch.setattr(binding, "ENCODES_ON", (DEVICE.type,))
    used: list[Codec | None] = []
    made = binding.GradientBuckets

    def noted(*arguments: Any, **options: Any) -> GradientBuckets:
        used.append(arguments[3])
        return made(*arguments, **options)

    monkeypatch.setattr(binding, "GradientBuckets", noted)
    assert trained(policy, codec, micro_batch) == plain
    assert used == [Codec[codec.upper()]]


def test_the_norm_is_that_of_the_gradient_wherever_it_is_encoded(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """saps with Ringmaster's bound asks for it, since that follows the noise."""
    sent: list[list[float]] = []
    send = Transport.send

    def noted(transport: Transport, step: Step, request: PushRequest) -> PushResult | None:
        sent[-1].append(request.grad_norm_squared)
        return send(transport, step, request)

    monkeypatch.setattr(Transport, "send", noted)
    for where in ((), (DEVICE.type,)):
        monkeypatch.setattr(binding, "ENCODES_ON", where)
        sent.append([])
        trained("saps:threshold=ringmaster", "int8", micro_batch=4)
    assert len(sent[0]) == 18
    assert min(sent[0]) > 0
    np.testing.assert_allclose(sent[1], sent[0], rtol=1e-5)


def test_a_gradient_that_is_not_finite_skips_the_step_and_poisons_nothing(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "ENCODES_ON", (DEVICE.type,))
    model = make_model().bfloat16()
    with join(
        "run", 0, batches=[10], samples=60, seed=5, policy="asp", codec="int8", allow_nonfinite=True
    ) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for k, (x, y) in enumerate(worker.batches((X.bfloat16(), Y.bfloat16()))):
            backward(loss_of(model, x * float("nan") if k == 2 else x, y))
            assert (worker.step() is None) == (k == 2)
        assert (worker.steps, worker.skipped) == (5, 1)
        assert np.isfinite(worker.store.pull()[0]).all()


class Driver:
    """Hold what torch.cuda.cudart() has, for memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.full = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if self.full:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_pins_are_taken_once_and_given_back() -> None:
    driver, one, two = Driver(), np.zeros(1000, np.float32), np.zeros(10, np.float32)
    pinned = PinnedMemory(driver)
    assert pinned.pin(one)
    assert pinned.pin(one)
    driver.full = True
    assert not pinned.pin(two), "it is used as it is"
    assert driver.registered == {one.ctypes.data: 4000}
    pinned.close()
    pinned.close()
    assert not driver.registered


@needs_cuda
@pytest.mark.parametrize("codec", ["f32", "int8", "int4"])
@pytest.mark.parametrize("depth", [1, "auto"])
def test_a_gpu_worker_trains_as_a_cpu_worker(shm: Path, codec: str, depth: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = make_model().to(device)
        with join(
            "run", 0, batches=[10], samples=SAMPLES, seed=5, policy="asp", codec=codec, depth=depth
        ) as worker:
            worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in worker.batches((X.to(device), Y.to(device))):
                backward(loss_of(model, x, y))
                worker.step()
            found.append(worker.store.pull()[0])
            pinned = worker._require().binding._pinned
            assert (pinned is not None) == (device == "cuda")
            assert pinned is None or pinned._held
        assert pinned is None or not pinned._held
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=2e-3)


@needs_cuda
def test_copies_overlap_backward() -> None:
    device = torch.device("cuda")
    parameters = [(nn.Parameter(p.detach().to(device)), t) for p, t in layers()]
    buckets = GradientBuckets(parameters, ELEMENTS, CudaBus(device), size=512)
    to = torch.zeros(ELEMENTS, pin_memory=True)
    buckets.begin(to)
    buckets.last_backward()
    backward_of(parameters)
    assert any(b.shipped is not None for b in buckets._buckets)
    buckets.finish()
    assert torch.equal(to, flat_gradient(parameters))


def test_an_unknown_codec_is_not_for_the_device() -> None:
    buckets = GradientBuckets(layers(), ELEMENTS, Bus(), Codec.NF4)
    buckets.begin(torch.zeros(0))
    with pytest.raises(InputError, match="int8 or int4"):
        buckets.finish()


def test_what_lies_between_the_parameters_is_zeroed() -> None:
    parameters = [place for _, place in layers()]
    assert binding._others(parameters, ELEMENTS) == [slice(1105, ELEMENTS)]
    assert binding._others([*parameters[2:], parameters[0]], ELEMENTS) == [
        slice(100, 800),
        slice(1105, ELEMENTS),
    ]
    assert binding._others([], 5) == [slice(0, 5)]
    assert binding._others(parameters, 1105) == []


def test_a_staging_buffer_that_was_used_changes_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left in it: a parameter without a gradient counts as zero, and gaps stay zero."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(7, 1)).to(DEVICE, torch.bfloat16)
    with join("run", 0, batches=[10], samples=30, seed=5, policy="asp") as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = worker.store.pull()[0]
        for x, y in worker.batches((X[:, :3].bfloat16(), Y.bfloat16())):
            backward(loss_of(model[:2], x, y))
            worker.step()
            assert worker._step is None
        after = worker.store.pull()[0]
        used = np.zeros(after.size, bool)
        for tensor in worker.store.tensors:
            used[tensor.offset : tensor.offset + tensor.elements] = not tensor.name.startswith("2.")
        assert (after != before)[used].any()
        np.testing.assert_array_equal(after[~used], before[~used])
