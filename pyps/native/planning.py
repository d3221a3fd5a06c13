"""What the steps of each rank cost, and the re-plan that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyps._native import ffi, lib
from pyps.native import Pointer, check, struct_values, u32_array, unsigned
from pyps.native.values import CostModel, RankCost

ANY_PLAN = 2**64 - 1


def get_costs(store: Pointer, ranks: int) -> list[RankCost]:
    c = ffi.new("pyps_rank_cost[]", ranks)
    check("costs", lib.pyps_get_costs(store, c, ranks))
    return [_rank_cost(c[k]) for k in range(ranks)]


def _rank_cost(c: Any) -> RankCost:
    kept = len(c.seconds)
    steps = range(max(0, c.steps - kept), c.steps)
    model = CostModel(**struct_values(CostModel, c.model))
    known = any((model.fixed_seconds, model.sample_seconds, model.least_seconds))
    return RankCost(
        c.steps,
        tuple(c.seconds[step % kept] for step in steps),
        c.data_seconds,
        c.sample_seconds,
        model if known else None,
    )


def set_cost_model(store: Pointer, model: CostModel) -> None:
    c = ffi.new("pyps_cost_model *")
    c.fixed_seconds, c.sample_seconds = model.fixed_seconds, model.sample_seconds
    c.least_seconds = model.least_seconds
    c.max_batch = unsigned("set_cost_model", "max_batch", model.max_batch, 32)
    check("set_cost_model", lib.pyps_set_cost_model(store, c))


def replan(store: Pointer, batches: Sequence[int], plan: int | None = None) -> None:
    present = ANY_PLAN if plan is None else unsigned("replan", "plan", plan, 63)
    array = u32_array("replan", "batches", batches)
    check("replan", lib.pyps_replan(store, array, len(batches), present))
