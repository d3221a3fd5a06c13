"""Gradients sent in fewer bits: how much is lost at once, and that it comes later."""

from __future__ import annotations

import pytest
import torch
import wire_jobs
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.torch.wire import decode, encode, install_wire
from pyps.worker.device.quantize import INT4, INT8, SCALE_BYTES, BlockFormat

FP32 = 1e-6  # relative: rounding of another order of summation
HALF = {"bf16": 2**-7, "f16": 2**-10}  # two roundings, each of half a unit in the last place, and the sum's
BYTES = {8: 0.27, 4: 0.27 / 1.7}  # of those of fp32, at most

torch.set_num_threads(1)


@pytest.mark.parametrize("wire", HALF)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_halves(ranks: Ranks, wire: str, options: dict[str, bool]) -> None:
    for errors in ranks.run(3, wire_jobs.half_errors, wire, options):
        assert 0 < max(errors) < HALF[wire]


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize(
    ("reload", "scale", "static"), [(False, 1.0, False), (True, 1.0, False), (True, 1024.0, True)]
)
def test_sent_and_kept_are_what_was_put_in(
    ranks: Ranks, wire: str, reload: bool, scale: float, static: bool
) -> None:
    for whole, without in ranks.run(3, wire_jobs.feedback_left, wire, reload, scale, static):
        assert whole < FP32
        assert without > 100 * FP32  # so that the check above means something


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bad_value_reaches_every_rank_and_stays_in_its_block(ranks: Ranks, bits: int) -> None:
    block = INT8.block if bits == 8 else INT4.block
    assert ranks.run(3, wire_jobs.one_bad_value, bits) == [(block, True, True)] * 3


def test_a_step_that_is_dropped_leaves_what_was_kept(ranks: Ranks) -> None:
    assert ranks.run(2, wire_jobs.kept_after_a_bad_step) == [True, True]


@pytest.mark.parametrize("form", [INT8, INT4])
def test_a_level_is_at_most_half_a_step_off(form: BlockFormat) -> None:
    values = torch.randn(3, 4 * form.block, generator=torch.Generator().manual_seed(1))
    values[0, : form.block] = 0.0
    values[1, : form.block] *= 1e-32
    packed = encode(form, values)
    assert packed.shape == (3, form.code_bytes(4 * form.block) + 4 * SCALE_BYTES)
    assert packed.nbytes <= BYTES[form.bits] * values.nbytes
    found = decode(form, packed, 4 * form.block)
    step = values.view(3, 4, -1).abs().amax(2, keepdim=True) / form.largest
    wrong = (found - values).view(3, 4, -1).abs()
    assert bool((wrong <= step * 0.5001 + 1e-30).all())
    assert not found[0, : form.block].any()
    assert not found[1, : form.block].any()


def refusals(group: torch.distributed.ProcessGroup) -> list[str]:
    """Return what is said of an unknown type, of a second hook, and of sparse gradients."""
    dense = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    sparse = DistributedDataParallel(torch.nn.Embedding(3, 2, sparse=True), process_group=group)
    install_wire(dense, "bf16")
    said = []
    for model, wire in ((dense, "int3"), (dense, "int8"), (sparse, "int8")):
        try:
            install_wire(model, wire)  # type: ignore[arg-type]
        except InputError as error:
            said.append(str(error))
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    unknown, second, sparse = ranks.run(2, refusals)[0]
    assert "'int3'; expected bf16, f16, int8 or int4" in unknown
    assert "one hook each" in second
    assert "sparse gradients; expected dense ones" in sparse
