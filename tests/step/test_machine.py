"""The step machine by scripts of events: no store, no thread and no clock."""

from __future__ import annotations

import pytest

from pyps.native.decisions import Advice, PolicyNeeds
from pyps.native.transfer import Ask
from pyps.step.events import (
    Abort,
    Action,
    Advised,
    Arrived,
    Check,
    Claimed,
    ClaimNext,
    Compute,
    Computed,
    Continue,
    End,
    Event,
    Finish,
    Flush,
    Interrupted,
    Load,
    Loaded,
    Partial,
    Pending,
    Pull,
    Pulled,
    RanOut,
    Refreshed,
    Rejoin,
    Rejoined,
    Return,
    Send,
    Sent,
    Take,
    Wanted,
    WasFenced,
)
from pyps.step.machine import TRANSITIONS, State, StepMachine, StepRules, WrongEvent
from pyps.store.policies import Policy

RANKS = 3


def needs(policy: str) -> PolicyNeeds:
    return Policy.known[policy]().needs


def machine(policy: str = "asp", depth: int = 1, **more: int) -> StepMachine:
    return StepMachine(StepRules(depth, needs(policy), RANKS, **more))  # type: ignore[arg-type]


def play(m: StepMachine, *script: tuple[Event, Action]) -> None:
    """Each event leads to its action."""
    for number, (event, action) in enumerate(script):
        assert m.receive(event) == action, number


STEP = ((Wanted(), ClaimNext()), (Claimed(1, 0), Pull()), (Pulled(0), Compute(0, may_claim=True)))


def test_a_serial_step_waits_for_its_push() -> None:
    m = machine("ssp")
    play(
        m,
        *STEP,
        (Computed(), Send(Ask(pulls=False))),
        (Sent(), Take()),
        (Arrived(), Return()),
        (Wanted(), ClaimNext()),
        (Claimed(1, 1), Pull()),
        (Pulled(1), Compute(1, may_claim=True)),
    )


def test_an_exchange_brings_the_next_parameters_unless_they_are_old() -> None:
    m = machine("asp")
    exchange = (
        (Computed(), Send(Ask(exchanges=True))),
        (Sent(), Take()),
        (Arrived(4), Load()),
        (Loaded(), Return()),
    )
    play(m, *STEP, *exchange, (Wanted(), ClaimNext()), (Claimed(1, 4 + RANKS), Compute(4, may_claim=True)))
    play(m, *exchange, (Wanted(), ClaimNext()), (Claimed(1, 5 + RANKS), Pull()))


def test_a_round_brings_the_next_parameters_unless_others_went_by() -> None:
    m = machine("bsp")
    play(m, *STEP, (Computed(), Send(Ask(exchanges=True))), (Sent(), Take()), (Arrived(1), Load()))
    play(m, (Loaded(), Return()), (Wanted(), ClaimNext()), (Claimed(1, 1), Compute(1, may_claim=True)))
    play(m, (Computed(), Send(Ask(exchanges=True))), (Sent(), Take()), (Arrived(2), Load()))
    play(m, (Loaded(), Return()), (Wanted(), ClaimNext()), (Claimed(1, 3), Pull()))


def test_a_turn_that_brought_parameters_is_never_old() -> None:
    m = machine("r2sp")
    play(m, *STEP, (Computed(), Send(Ask(exchanges=True))), (Sent(), Take()), (Arrived(4), Load()))
    play(m, (Loaded(), Return()), (Wanted(), ClaimNext()), (Claimed(1, 99), Compute(4, may_claim=True)))


def test_a_pipeline_claims_ahead_and_keeps_depth_minus_one_under_way() -> None:
    m, ask = machine("hps", 3), Ask(exchanges=True, claims=1)
    play(m, (Wanted(), ClaimNext(2)), (Claimed(3, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(ask)), (Sent(), Return()), (Wanted(), Compute(0)))
    play(
        m, (Computed(), Take(waits=False)), (Pending(), Send(ask)), (Sent(), Return()), (Wanted(), Compute(0))
    )
    play(
        m,
        (Computed(), Take()),
        (Arrived(1, 1), Take(waits=False)),
        (Pending(), Load()),
        (Loaded(), Send(ask)),
    )
    play(m, (Sent(), Return()), (Wanted(), Compute(1)))


def test_a_pipeline_without_claims_waits_for_one() -> None:
    m = machine("ssp", 2)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(1, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(claims=2))), (Sent(), Return()))
    play(m, (Wanted(), Take()), (Arrived(1, 0), Load()), (Loaded(), ClaimNext(1)))
    play(m, (Claimed(2, 3), Pull()), (Pulled(3), Compute(3)))


def test_fenced_in_a_pipeline_all_that_travels_fails_and_the_step_is_dropped() -> None:
    m = machine("hps", 3)
    play(m, (Wanted(), ClaimNext(2)), (Claimed(3, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(0)))
    play(
        m,
        (Computed(), Take(waits=False)),
        (Pending(), Send(Ask(exchanges=True, claims=1))),
        (Sent(), Return()),
    )
    play(m, (Wanted(), Compute(0)), (Computed(), Take()), (Arrived(fenced=True), Take()))
    play(m, (Arrived(fenced=True), Rejoin()), (Rejoined(), Return(dropped=True)), (Wanted(), ClaimNext(2)))


def test_fenced_before_a_step_the_worker_claims_anew() -> None:
    m = machine("bsp")
    play(
        m,
        (Wanted(), ClaimNext()),
        (WasFenced(), Rejoin()),
        (Rejoined(), ClaimNext()),
        (Claimed(1, 0), Pull()),
    )
    play(m, (WasFenced(), Rejoin()), (Rejoined(), ClaimNext()), (RanOut(), End()))


def test_a_worker_that_ran_ahead_waits_once_for_all() -> None:
    m = machine("hps", 3)
    play(m, (Wanted(), ClaimNext(2)), (Claimed(3, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(0)))
    play(
        m,
        (Computed(), Take(waits=False)),
        (Pending(), Send(Ask(exchanges=True, claims=1))),
        (Sent(), Return()),
    )
    late = Arrived(1, 1, waited=3.0, way=1.0, computed=1.0)
    play(m, (Wanted(), Compute(0)), (Computed(), Take()), (late, Take(waits=False)), (Pending(), Load()))
    play(m, (Loaded(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()))
    play(m, (Wanted(), Take()), (late, Take()), (Arrived(3, 1), Load()), (Loaded(), Compute(3)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(3)))


def test_local_steps_wait_for_their_first_transfer() -> None:
    m = machine("asp", 2, local=True)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(2, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()))
    play(m, (Wanted(), Take()), (Arrived(1, 1), Load()), (Loaded(), Compute(1)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(1)))


def test_local_steps_of_a_pipeline_go_on_from_what_has_arrived() -> None:
    m = machine("asp", 2, local=True)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(2, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Partial(0, 2, 8, 2), Continue(0)), (Computed(), Send(Ask(exchanges=True, claims=1))))
    play(m, (Sent(), Return()), (Wanted(), Take()), (Arrived(1, 1), Load()), (Loaded(), Compute(1)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(1)))
    play(m, (Partial(0, 2, 8, 2), Take(waits=False)), (Pending(), Continue(1)))
    play(
        m,
        (Partial(2, 4, 8, 2), Take(waits=False)),
        (Arrived(2, 1), Load(merges=True)),
        (Loaded(), Continue(2)),
    )


def test_serial_local_steps_merge_where_nothing_waits() -> None:
    m = machine("asp", local=True, merges=1)
    play(
        m,
        *STEP,
        (Partial(0, 2, 8, 2), Continue(0)),
        (Partial(2, 4, 8, 2), Pull(merges=True)),
        (Pulled(7), Continue(7)),
    )
    m = machine("bsp", local=True, merges=1)
    play(m, *STEP, (Partial(0, 2, 8, 2), Continue(0)), (Partial(2, 4, 8, 2), Continue(0)))


def test_a_policy_that_looks_between_micro_batches_may_end_a_step() -> None:
    m, check = machine("saps"), (Partial(0, 2, 8, 2), Check(2, 2))
    assert needs("saps").checks_between_micro_batches
    play(m, *STEP, check, (Advised(Advice.CONTINUE), Continue(0)))
    play(m, check, (Advised(Advice.PUSH_NOW), Finish()), (Wanted(), ClaimNext()), (Claimed(1, 0), Pull()))
    play(
        m,
        (Pulled(0), Compute(0, may_claim=True)),
        check,
        (Advised(Advice.ABORT), Abort()),
        (Wanted(), ClaimNext()),
    )
    play(m, (Claimed(1, 0), Pull()), (Pulled(0), Compute(0, may_claim=True)), check)
    play(m, (WasFenced(), Rejoin()), (Rejoined(), Abort(fenced=True)), (Wanted(), ClaimNext()))


def test_nothing_is_under_way_after_a_flush() -> None:
    m = machine("hps", 2)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(2, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(0)))
    play(m, (Flush(), Take()), (Arrived(1, 1), Load()), (Loaded(), Return()), (Refreshed(5), Return()))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(5)))


def test_a_step_whose_samples_were_lost_in_a_flush_is_dropped() -> None:
    m = machine("hps", 2)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(2, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(Ask(exchanges=True, claims=1))), (Sent(), Return()), (Wanted(), Compute(0)))
    play(m, (Flush(), Take()), (Arrived(fenced=True), Rejoin()), (Rejoined(), Return()))
    play(m, (Refreshed(5), Return()), (Computed(), Return(dropped=True)), (Wanted(), ClaimNext(1)))


def test_a_look_that_was_refused_rejoins_and_the_step_under_way_is_dropped() -> None:
    m = machine("asp")
    play(m, *STEP, (Flush(), Return()), (WasFenced(), Rejoin()), (Rejoined(), Return()))
    play(m, (Refreshed(5), Return()), (Partial(0, 2, 8, 2), Abort(fenced=True)), (Wanted(), ClaimNext()))
    play(m, (Claimed(1, 5), Compute(5, may_claim=True)), (Flush(), Return()), (Refreshed(6), Return()))
    play(m, (Computed(), Send(Ask(exchanges=True))), (Sent(), Take()), (Arrived(7), Load()))
    play(m, (Loaded(), Return()), (WasFenced(), Rejoin()), (Rejoined(), Return()), (Wanted(), ClaimNext()))


def test_parameters_of_a_transfer_that_was_not_taken_are_loaded_after_it() -> None:
    m = machine("asp", 3, local=True)
    ask = Ask(exchanges=True, claims=1)
    play(m, (Wanted(), ClaimNext(2)), (Claimed(3, 0), Pull()), (Pulled(0), Compute(0)))
    play(m, (Computed(), Send(ask)), (Sent(), Return()), (Wanted(), Take()), (Arrived(1, 1), Load()))
    play(m, (Loaded(), Compute(1)), (Computed(), Send(ask)), (Sent(), Return()), (Wanted(), Compute(1)))
    play(m, (Computed(), Take(waits=False)), (Pending(), Send(ask)), (Sent(), Return()))
    play(m, (Wanted(), Compute(1)), (Computed(), Take()), (Arrived(2, 1), Take(waits=False)))
    play(m, (Pending(), Load()), (Arrived(3, 1), Load()), (Loaded(), Send(ask)), (Sent(), Return()))
    assert m.version == 3
    play(m, (Flush(), Take()), (Arrived(4), Load()), (Loaded(), Return()))


def test_after_a_pipelines_transfer_has_failed_nothing_follows() -> None:
    m = machine("hps", 2)
    play(m, (Wanted(), ClaimNext(1)), (Claimed(2, 0), Pull()), (Pulled(0), Compute(0)))
    play(
        m,
        (Computed(), Send(Ask(exchanges=True, claims=1))),
        (Sent(), Return()),
        (Wanted(), Compute(0)),
        (Computed(), Take()),
    )
    m.receive(Interrupted(transfer=True))
    assert m.state is State.FAILED
    with pytest.raises(WrongEvent, match="found Wanted while it waits for the end"):
        m.receive(Wanted())


def test_what_is_not_in_the_table_is_refused() -> None:
    kinds = {kind for row in TRANSITIONS.values() for kind in row}
    assert set(TRANSITIONS) == set(State)
    assert len(kinds) == 16, "every event has its place"
    m = machine()
    with pytest.raises(WrongEvent, match="found Pulled while it waits for the trainer, between two steps"):
        m.receive(Pulled(1))
