"""Test what policies ask of workers, as the C core answers it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pyps import errors, native
from pyps.native.decisions import PolicyParams
from pyps.simulate import Logistic, Scenario, SimWorker, simulate
from pyps.store.policies import Custom, Policy, SaPS, policy_named

# Under any parameters; every policy that is not named for a need does not have it.
NEEDS = {
    "uses_turns": {"r2sp"},
    "checks_between_micro_batches": {"backup", "saps"},
    "needs_grad_norm": {"saps"},
    "resizes_batches": {"hps"},
    "allows_pipeline": set(Policy.known) - {"bsp", "backup", "quorum"},
    "waits_for_rounds": {"bsp", "backup", "quorum", "hps"},
    "starts_at_once": {"asp", "dynsgd", "saps"},
    "collects_pushes": {"bsp", "backup", "quorum", "hps", "softsync"},
}


@pytest.mark.parametrize("name", sorted(Policy.known))
def test_needs_of_each_policy(name: str) -> None:
    needs = native.policy_needs(Policy.known[name].number)
    assert asdict(needs) == {need: name in having for need, having in NEEDS.items()}


def test_parameters_can_make_a_need_go_away() -> None:
    assert native.policy_needs(SaPS.number, SaPS(threshold="ringmaster").params()).needs_grad_norm
    assert not native.policy_needs(SaPS.number, SaPS(threshold="quantile").params()).needs_grad_norm


def test_a_custom_policy_needs_nothing_more_than_a_push() -> None:
    needs = native.policy_needs(Custom.number, PolicyParams(custom=1))
    assert [need for need, value in asdict(needs).items() if value] == ["allows_pipeline"]


MOST = {
    "softsync": ("n", 1_000_000),
    "dssp": ("extra", 10_000),
    "saps": ("noise", 1e9),
    "r2sp": ("slack", 1e6),
    "quorum": ("grace", 1e6),
    "bsp": ("round_timeout_seconds", 1e9),
}


@pytest.mark.parametrize("name", MOST)
def test_what_the_core_would_refuse_is_refused_by_its_name(name: str) -> None:
    kind, (field, most) = Policy.known[name], MOST[name]
    over = most + 1
    assert kind(**{field: most}).needs
    with pytest.raises(errors.InputError, match=rf"{name}: {field}: found {over}; expected a .*{int(most)}"):
        kind(**{field: over})


def test_an_unknown_number_is_refused() -> None:
    unknown = 1 + max(kind.number for kind in Policy.known.values())
    with pytest.raises(errors.UnknownPolicy, match=f"found {unknown}"):
        native.policy_needs(unknown)


@pytest.mark.parametrize("text", [*Policy.known, "saps:threshold=quantile", "saps:threshold=fixed"])
def test_virtual_time_without_gradients_refuses_policies_that_look_at_them(text: str) -> None:
    """Their norms would all be 0: the figures would be those of asp."""
    scenario = Scenario(tuple(SimWorker(f"w{k}", 4, lambda b: 0.1 * b) for k in range(2)))
    objective = Logistic(seed=0)
    assert simulate(scenario, text, iterations=2, objective=objective).samples == 16
    if policy_named(text).needs.needs_grad_norm:
        with pytest.raises(errors.InputError, match="saps, which looks at gradients; expected"):
            simulate(scenario, text, iterations=2)
    else:
        assert simulate(scenario, text, iterations=2).samples == 16
