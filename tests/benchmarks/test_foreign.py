"""Scripts as strangers write them: with pyps they train as one process does, and resume where they were."""

from __future__ import annotations

from pathlib import Path

import foreign
import pytest
from ranks import PRELOADED

EXACT, RESUMED = 1e-10, 1e-10  # relative, in float64; with autocast the two sides round in other orders
foreign.PRELOADED += PRELOADED  # a lane has one forkserver: this test may be the one that starts it
FASTER = 1.15  # at least; the devices are emulated on cores that others use, too


@pytest.mark.parametrize("name", foreign.NAMES)
def test_two_unlike_ranks_are_one_process(name: str) -> None:
    assert foreign.exactness(name) < EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("name", foreign.NAMES)
def test_a_run_goes_on_where_it_was(name: str) -> None:
    assert foreign.resumed(name) < RESUMED


@pytest.mark.thorough
@pytest.mark.parametrize("name", foreign.NAMES)
def test_a_step_is_faster(name: str) -> None:
    plain, uneven = foreign.step_seconds(name)
    assert plain / uneven > FASTER


@pytest.mark.parametrize("name", foreign.NAMES)
def test_few_lines_change(name: str) -> None:
    lost, gained = foreign.lines_changed(name)
    assert gained < lost < 40


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    script = foreign.HERE / "uneven" / "segmentation.py"
    wrong = tmp_path / "segmentation.py"
    wrong.write_text(script.read_text().replace("cross_entropy(model(", "1.001 * cross_entropy(model("))
    found = [foreign.run(one, str(tmp_path), (0.0,), 3, exact=True)[0] for one in (script, wrong)]
    assert foreign.off(*found) > 1e-5
