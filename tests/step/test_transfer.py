"""One transfer's order of calls, and which errors end it."""

from __future__ import annotations

from typing import Any

import pytest

from pyps.errors import Fenced, LinkLost, NotFinite, PushRejected, StoreError
from pyps.native.transfer import Ask, Transferred
from pyps.native.values import Claim, PushResult
from pyps.step.transfer import Transfers, Verb

RESULT = PushResult(version=4, staleness=0, sources=1, samples=1, wait_seconds=0.0)
CLAIM = Claim(first=8, count=1, batch=1, round=0, plan=0, wait_seconds=0.0, version=3)
VERSION = 4
PLAIN = [Verb.LIMIT, Verb.PUSH, Verb.CLAIM, Verb.CLAIM, Verb.PULL]


class Store:
    """Answers a transfer's verbs and notes them; `raises` says which of them fail."""

    def __init__(self, **raises: Exception) -> None:
        self.asked: list[Verb] = []
        self._raises = raises

    def run(self, ask: Ask, transfers: Transfers | None = None, whole: bool = True) -> Transferred:
        """whole: an exchange is one call."""
        verbs = {
            Verb.PUSH: lambda: self._answer(Verb.PUSH, RESULT),
            Verb.EXCHANGE: lambda: (
                self._answer(Verb.EXCHANGE, (RESULT, VERSION))
                if whole
                else (self._answer(Verb.PUSH, RESULT), None)
            ),
            Verb.SKIP: lambda: self._answer(Verb.SKIP, None),
            Verb.PULL: lambda: self._answer(Verb.PULL, VERSION),
        }
        return (transfers or Transfers()).run(ask, self, verbs)

    def set_max_samples(self, most: int) -> None:
        self._answer(Verb.LIMIT, None)

    def start_ahead(self, after: int | None) -> Claim:
        found: Claim = self._answer(Verb.CLAIM, CLAIM)
        return found

    def _answer(self, verb: Verb, answer: Any) -> Any:
        self.asked.append(verb)
        if verb.value in self._raises:
            raise self._raises[verb.value]
        return answer


def test_a_pull_follows_the_claims_or_comes_with_the_push() -> None:
    store = Store()
    done = store.run(Ask(claims=2, max_samples=9))
    assert store.asked == PLAIN
    assert (done.result, done.claims, done.version) == (RESULT, (CLAIM, CLAIM), VERSION)
    assert [kind for kind, _, _ in done.spans] == ["push", "pull"]
    store = Store()
    done = store.run(Ask(exchanges=True, claims=1))
    assert store.asked == [Verb.EXCHANGE, Verb.CLAIM]
    assert done.version == VERSION
    store = Store()
    assert store.run(Ask(pulls=False)).version is None
    assert store.asked == [Verb.PUSH]


def test_an_exchange_of_two_calls_pulls_before_it_claims() -> None:
    store = Store()
    store.run(Ask(exchanges=True, claims=1), whole=False)
    assert store.asked == [Verb.PUSH, Verb.PULL, Verb.CLAIM]


def test_a_rejected_push_is_part_of_a_transfer() -> None:
    store = Store(push=PushRejected("push", "too old"))
    done = store.run(Ask(claims=2, max_samples=9))
    assert store.asked == PLAIN
    assert (done.result, done.rejected, done.skipped, done.version) == (None, True, False, VERSION)


def test_a_step_that_is_not_finite_is_skipped_in_a_transfer() -> None:
    store = Store(push=NotFinite("push", "nan"))
    done = store.run(Ask(claims=1))
    assert store.asked == [Verb.PUSH, Verb.SKIP, Verb.CLAIM, Verb.PULL]
    assert (done.result, done.rejected, done.skipped, done.version) == (None, False, True, VERSION)


@pytest.mark.parametrize("error", [PushRejected("push", "too old"), NotFinite("push", "nan")])
def test_one_that_is_alone_says_what_became_of_its_push_and_of_no_other(error: StoreError) -> None:
    transfers, alone = Transfers(), Ask(alone=True)
    store = Store(push=error)
    with pytest.raises(type(error)):
        store.run(alone, transfers)
    assert store.asked == [Verb.PUSH]
    assert Store().run(Ask(), transfers).result == RESULT
    with pytest.raises(Fenced):
        Store(push=Fenced("push", "late")).run(Ask(), transfers)
    assert Store().run(alone, transfers).result == RESULT


@pytest.mark.parametrize("error", [Fenced("claim", "late"), Fenced("pull", "late"), NotFinite("pull", "inf")])
def test_what_is_raised_after_a_push_leaves_its_result(error: StoreError) -> None:
    transfers, verb = Transfers(), error.what
    done = Store(**{verb: error}).run(Ask(claims=1), transfers)
    assert (done.result, done.version, done.fenced) == (RESULT, None, True)
    with pytest.raises(type(error)):
        Store().run(Ask(), transfers)


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
    transfers, ask = Transfers(), Ask(claims=1, max_samples=9)
    with pytest.raises(type(error)):
        Store(**{verb: error}).run(ask, transfers)
    later = Store()
    with pytest.raises(type(error)) as failed:
        later.run(ask, transfers)
    assert failed.value is error
    assert not later.asked
    transfers.begin_again()
    assert later.run(Ask(), transfers).result == RESULT


def test_fenced_without_a_push_that_counts_is_an_error() -> None:
    store = Store(push=PushRejected("push", "too old"), pull=Fenced("pull", "late"))
    with pytest.raises(Fenced):
        store.run(Ask())
