"""Define what outsiders may bring, under AddressSanitizer: any bytes as segments, encoded data and
journals, from seeded mutations of a corpus; calls in any order, by several processes on one segment.
"""

from __future__ import annotations

from pathlib import Path

import programs
import pytest
from sampled import examples, sampled

pytestmark = pytest.mark.timeout(300)  # the first test of a sanitizer builds the core

RUNS = {"attach": 2_000, "decode": 10_000, "journal": 10_000}  # in segments, rounds wait for real deadlines


@pytest.fixture
def folder(programs_folder: Path) -> Path:
    if not programs.usable("address"):
        pytest.skip("the C compiler has no address sanitizer")
    return programs_folder


@pytest.mark.promise("the C core checks every field before it replays them")
@pytest.mark.promise("what processes change is checked where it is used")
@pytest.mark.parametrize("of", programs.FUZZED)
def test_no_bytes_do_harm(folder: Path, of: str) -> None:
    program, runs = programs.build(folder, f"fuzz_{of}", "address"), examples(RUNS[of] // 8, RUNS[of])
    done = programs.run(program, str(programs.corpus(of)), "2026", str(runs))
    assert done.returncode == 0, done.stderr
    assert f"{runs} mutations: no fault" in done.stdout


MUTATIONS = {
    "chunk words are believed": (
        "attach",
        programs.Change("store/buffers.c", "if (buffer >= s->layout.buffer_count)", "if (0)"),
    ),
    "views are believed": (
        "attach",
        programs.Change("store/view_store.c", "!view_valid(out, s->expected) || out->seq", "out->seq"),
    ),
    "ranks are believed": (
        "attach",
        programs.Change(
            "policy/view_valid.c",
            "if (slot_plus_1 > v->participants) return false;",
            "",
        ),
    ),
    "claims ahead are believed": (
        "attach",
        programs.Change(
            "policy/view_valid.c", "if (m->ahead > v->max_ahead || m->ahead_started > m->ahead", "if (0"
        ),
    ),
    "slots in a journal are believed": (
        "journal",
        programs.Change("policy/replay.c", "e->slot >= v->participants ||", ""),
    ),
    "lengths are believed": (
        "decode",
        programs.Change("kernels/codec.c", "if (bytes != pyps_encoded_bytes(codec, count))", "if (0)"),
    ),
}


@pytest.mark.parametrize("what", sampled(MUTATIONS))
def test_a_check_left_out_is_found(folder: Path, what: str) -> None:
    of, change = MUTATIONS[what]
    program = programs.build(folder, f"fuzz_{of}", "address", change=change)
    done = programs.run(program, str(programs.corpus(of)), "2026", str(RUNS[of]))
    assert done.returncode != 0, f"{RUNS[of]} inputs, and none of them reaches what is missing"


@pytest.mark.parametrize("seed", sampled(["1", "10"]))
def test_no_order_of_calls_does_harm(folder: Path, seed: str) -> None:
    done = programs.run(programs.build(folder, "calls", "address"), seed, "300", "3")
    assert done.returncode == 0, done.stderr
    assert "3 times 300 calls: no fault" in done.stdout


def test_calls_in_any_order_find_what_crashed_an_exchange(folder: Path) -> None:
    """In a round in which another worker pushes ranges, runs begin at odd places."""
    change = programs.Change("store/apply.c", " && !ticket_is_ranged(s);", ";")
    program = programs.build(folder, "calls", "address", change=change)
    assert any(programs.run(program, str(seed), "2000", "3").returncode for seed in (1, 10, 11, 12))
