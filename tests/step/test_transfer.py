"""One transfer's order of calls, and which errors end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyps.errors import Fenced, LinkLost, NotFinite, PushRejected, StoreError
from pyps.step.transfer import Ask, Transfers, Verb

RESULT, PARAMETERS = "result", "parameters"
PLAIN = [Verb.LIMIT, Verb.PUSH, Verb.CLAIM, Verb.CLAIM, Verb.PULL]


class Store:
    """Answers a transfer's verbs and notes them; `raises` says which of them fail."""

    def __init__(self, **raises: Exception) -> None:
        self.asked: list[Verb] = []
        self._raises = raises

    def verbs(self) -> dict[Verb, Callable[[], Any]]:
        answers = {
            Verb.LIMIT: None,
            Verb.PUSH: RESULT,
            Verb.EXCHANGE: (RESULT, PARAMETERS),
            Verb.SKIP: None,
            Verb.CLAIM: "claim",
            Verb.PULL: PARAMETERS,
        }
        return {verb: lambda v=verb, a=answer: self._answer(v, a) for verb, answer in answers.items()}  # type: ignore[misc]

    def _answer(self, verb: Verb, answer: Any) -> Any:
        self.asked.append(verb)
        if verb.value in self._raises:
            raise self._raises[verb.value]
        return answer


def test_a_pull_follows_the_claims_or_comes_with_the_push() -> None:
    store = Store()
    done = Transfers().run(Ask(claims=2), store.verbs())
    assert store.asked == PLAIN
    assert (done.result, done.claims, done.pulled) == (RESULT, ("claim", "claim"), PARAMETERS)
    store = Store()
    done = Transfers().run(Ask(exchanges=True, claims=1), store.verbs())
    assert store.asked == [Verb.LIMIT, Verb.EXCHANGE, Verb.CLAIM]
    assert done.pulled == PARAMETERS
    store = Store()
    assert Transfers().run(Ask(pulls=False), store.verbs()).pulled is None
    assert store.asked == [Verb.LIMIT, Verb.PUSH]


def test_an_exchange_of_two_calls_pulls_before_it_claims() -> None:
    store = Store()
    verbs = store.verbs() | {Verb.EXCHANGE: lambda: (store._answer(Verb.PUSH, RESULT), None)}
    Transfers().run(Ask(exchanges=True, claims=1), verbs)
    assert store.asked == [Verb.LIMIT, Verb.PUSH, Verb.PULL, Verb.CLAIM]


def test_a_rejected_push_is_part_of_a_transfer() -> None:
    store = Store(push=PushRejected("push", "too old"))
    done = Transfers().run(Ask(claims=2), store.verbs())
    assert store.asked == PLAIN
    assert (done.result, done.pulled) == (None, PARAMETERS)


def test_a_step_that_is_not_finite_is_skipped_in_a_transfer() -> None:
    store = Store(push=NotFinite("push", "nan"))
    done = Transfers().run(Ask(claims=1), store.verbs())
    assert store.asked == [Verb.LIMIT, Verb.PUSH, Verb.SKIP, Verb.CLAIM, Verb.PULL]
    assert (done.result, done.skipped, done.pulled) == (None, True, PARAMETERS)


@pytest.mark.parametrize("error", [PushRejected("push", "too old"), NotFinite("push", "nan")])
def test_one_that_is_alone_says_what_became_of_its_push_and_of_no_other(error: StoreError) -> None:
    transfers, alone = Transfers(), Ask(alone=True)
    store = Store(push=error)
    with pytest.raises(type(error)):
        transfers.run(alone, store.verbs())
    assert store.asked == [Verb.LIMIT, Verb.PUSH]
    assert transfers.run(Ask(), Store().verbs()).result == RESULT
    with pytest.raises(Fenced):
        transfers.run(Ask(), Store(push=Fenced("push", "late")).verbs())
    assert transfers.run(alone, Store().verbs()).result == RESULT


@pytest.mark.parametrize("error", [Fenced("claim", "late"), Fenced("pull", "late"), NotFinite("pull", "inf")])
def test_what_is_raised_after_a_push_leaves_its_result(error: StoreError) -> None:
    transfers, verb = Transfers(), error.what
    done = transfers.run(Ask(claims=1), Store(**{verb: error}).verbs())
    assert (done.result, done.pulled, done.error) == (RESULT, None, error)
    with pytest.raises(type(error)):
        transfers.run(Ask(), Store().verbs())


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        ("push", Fenced("push", "late")),
        ("push", LinkLost("push", "gone")),
        ("pull", LinkLost("pull", "gone")),
        ("limit", Fenced("limit", "late")),
    ],
)
def test_after_a_failed_transfer_all_fail_alike_until_the_worker_begins_again(
    verb: str, error: Exception
) -> None:
    transfers = Transfers()
    with pytest.raises(type(error)):
        transfers.run(Ask(claims=1), Store(**{verb: error}).verbs())
    later = Store()
    with pytest.raises(type(error)) as failed:
        transfers.run(Ask(claims=1), later.verbs())
    assert failed.value is error
    assert not later.asked
    transfers.begin_again()
    assert transfers.run(Ask(), later.verbs()).result == RESULT


def test_fenced_without_a_push_that_counts_is_an_error() -> None:
    store = Store(push=PushRejected("push", "too old"), pull=Fenced("pull", "late"))
    with pytest.raises(Fenced):
        Transfers().run(Ask(), store.verbs())
