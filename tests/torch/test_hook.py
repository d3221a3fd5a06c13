"""The reduced gradient of uneven batches is that of one process; what few bits lose comes later."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ddp_jobs
import ddp_more_jobs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from sampled import examples, sampled

from pyps.errors import InputError
from pyps.torch import weighted_hook
from pyps.torch.exchange import decode, encode, packed_bytes
from pyps.torch.weighting import as_float64, rows_of
from pyps.worker.quantize import INT4, INT8, BlockFormat

FP32 = 1e-6  # relative: rounding of another order of summation
FP64_AFTER_100 = 1e-10
HALF = {"bf16": 2**-7, "f16": 2**-10}  # two roundings, each of half a unit in the last place, and the sum's
INT8_BYTES = 0.27

torch.set_num_threads(1)


@pytest.mark.parametrize("batches", [[48, 16], [1, 3], [3, 1, 20], [31, 1, 2, 9]])
def test_the_gradient_is_the_one_of_one_process(ranks: Ranks, batches: list[int]) -> None:
    for weighted, plain in ranks.run(len(batches), ddp_jobs.gradient_errors, batches, {}):
        print(f"{batches}: weighted {max(weighted):.1e}, plain DDP {max(plain):.1%}")
        assert max(weighted) < FP32
        assert min(plain) > 0.01


@settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(8, 25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ranks are meant to be used again
)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=4), st.data())
def test_whatever_the_split_and_the_micro_batches(ranks: Ranks, batches: list[int], data: Any) -> None:
    parts = [data.draw(st.integers(1, min(b, 3))) for b in batches]
    for weighted, _ in ranks.run(len(batches), ddp_jobs.gradient_errors, batches, {}, parts):
        assert max(weighted) < FP32


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
    ],
)
def test_with_options_of_ddp(ranks: Ranks, ddp_options: dict[str, Any]) -> None:
    for weighted, _ in ranks.run(3, ddp_jobs.gradient_errors, [9, 30, 2], {}, None, ddp_options):
        assert max(weighted) < FP32


@pytest.mark.parametrize("ddp_options", [{}, {"static_graph": True}])
def test_parameters_of_two_types(ranks: Ranks, ddp_options: dict[str, Any]) -> None:
    for errors, counted in ranks.run(2, ddp_jobs.two_types_errors, [9, 30], ddp_options):
        assert max(errors) < FP32
        assert counted == len(errors)


def test_a_module_may_go_into_another_ddp(ranks: Ranks) -> None:
    for errors in ranks.run(2, ddp_jobs.errors_in_another_ddp, [9, 4]):
        assert max(errors) < 1e-12


def test_a_cache_for_the_next_call_is_no_part_of_a_loss(ranks: Ranks) -> None:
    assert max(ranks.run(2, ddp_jobs.error_with_a_cache, [9, 4], [5, 8])) < FP32


@pytest.mark.parametrize("look", ["eval", "table", "each sample"])
def test_a_look_at_the_model_is_no_part_of_a_loss(ranks: Ranks, look: str) -> None:
    for errors in ranks.run(2, ddp_more_jobs.errors_after_looks, [9, 4], look):
        assert max(errors) < 1e-12


@pytest.mark.thorough
@pytest.mark.timeout(240)  # a cold compile takes a minute of two busy cores
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(ranks: Ranks, tmp_path: Path, backend: str, static: bool) -> None:
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    options = {"static_graph": static}
    job = ddp_jobs.compiled_errors
    for weighted, _ in ranks.run(2, job, [48, 16], options, backend, str(tmp_path)):
        assert max(weighted) < FP32


@pytest.mark.parametrize("wire", HALF)
def test_halves(ranks: Ranks, wire: str) -> None:
    for weighted, _ in ranks.run(2, ddp_jobs.gradient_errors, [48, 16], {"wire": wire}):
        assert 0 < max(weighted) < HALF[wire]


@pytest.mark.parametrize("batches", sampled([[48, 16], [5, 1, 3]], 1))
def test_training_is_the_one_of_one_process(ranks: Ranks, batches: list[int]) -> None:
    assert max(ranks.run(len(batches), ddp_jobs.trained_apart, batches, 100)) < FP64_AFTER_100


@pytest.mark.parametrize("said", [False, True])
def test_weights_by_targets(ranks: Ranks, said: bool) -> None:
    for errors in ranks.run(3, ddp_jobs.token_errors, [20, 3, 9], said):
        assert max(errors) < FP32


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_sent_and_kept_are_what_was_put_in(ranks: Ranks, wire: str, reload: bool) -> None:
    for whole, without, share in ranks.run(3, ddp_jobs.feedback_left, [20, 3, 9], wire, reload):
        assert whole < FP32
        assert without > 100 * FP32  # so that the check above means something
        assert share <= (INT8_BYTES if wire == "int8" else INT8_BYTES / 1.7)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bad_value_reaches_every_rank_and_stays_in_its_block(ranks: Ranks, bits: int) -> None:
    block = INT8.block if bits == 8 else INT4.block
    assert ranks.run(3, ddp_jobs.one_bad_value, bits) == [(block, True, True)] * 3


def test_a_step_that_is_dropped_leaves_what_was_kept(ranks: Ranks) -> None:
    assert ranks.run(2, ddp_jobs.kept_after_a_bad_step) == [True, True]


@pytest.mark.parametrize("form", [INT8, INT4])
def test_a_level_is_at_most_half_a_step_off(form: BlockFormat) -> None:
    values = torch.randn(3, 4 * form.block, generator=torch.Generator().manual_seed(1))
    values[0, : form.block] = 0.0
    values[1, : form.block] *= 1e-32
    packed = encode(form, values)
    assert packed.shape == (3, packed_bytes(form, 4 * form.block))
    found = decode(form, packed, 4 * form.block)
    step = values.view(3, 4, -1).abs().amax(2, keepdim=True) / form.largest
    wrong = (found - values).view(3, 4, -1).abs()
    assert bool((wrong <= step * 0.5001 + 1e-30).all())
    assert not found[0, : form.block].any()
    assert not found[1, : form.block].any()


def test_a_first_round_that_is_not_the_samplers_is_refused(ranks: Ranks) -> None:
    assert ranks.run(2, ddp_jobs.checked, [5, 3], [5, 3]) == ["as planned"] * 2
    for said in ranks.run(2, ddp_jobs.checked, [5, 3], [5, 4]):
        assert "of 9, by the first tensor" in said


def test_where_one_rank_alone_would_refuse_all_do(ranks: Ranks) -> None:
    """Of time first, 8 steps: to rank 0, 8 of 24 are twice its 4 of 12."""
    said = ranks.run(3, ddp_jobs.checked, [4, 3, 5], [8, 8, 8], True)
    assert "other ranks" in said[0]
    assert all("by the first tensor" in one for one in said[1:])


def test_sparse_gradients(ranks: Ranks) -> None:
    for errors in ranks.run(2, ddp_jobs.sparse_errors, [5, 3], 3):
        assert max(errors) < 1e-12


def test_the_samples_of_a_batch() -> None:
    assert rows_of(({"ids": torch.zeros(5, 2)}, {})) == 5
    assert rows_of((torch.tensor(1.0), [torch.zeros(3)])) == 3
    with pytest.raises(InputError, match=r"no tensor.*count="):
        rows_of(("text", 3))


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="Linear; expected a DistributedDataParallel, or what"):
        weighted_hook(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("weight", [3, 2.5, torch.tensor(4), torch.tensor(1.5)])
def test_a_weight_as_a_tensor(weight: Any) -> None:
    found = as_float64(weight, torch.device("cpu"))
    assert (found.dtype, found.shape, float(found)) == (torch.float64, (), float(weight))
