"""The C programs under sanitizers: the store's interleavings, the kernels, a short torture of processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs
import pytest
from sampled import examples, sampled

pytestmark = pytest.mark.timeout(300)  # the first test of a sanitizer builds the core


@pytest.fixture
def threads(programs_folder: Path) -> Path:
    if not programs.usable("thread"):
        pytest.skip("the C compiler has no thread sanitizer, or it cannot run here")
    return programs_folder


@pytest.fixture
def folder(programs_folder: Path) -> Path:
    if not programs.usable("address"):
        pytest.skip("the C compiler has no address sanitizer")
    return programs_folder


def test_the_sanitizers_would_say_so(folder: Path, tmp_path: Path) -> None:
    """A read after free, a shift too far and a float too large for an int all end the program."""
    source = tmp_path / "wrong.c"
    source.write_text(
        """
        #include <stdlib.h>
        int main(int argc, char **argv) {
            int which = atoi(argv[1]), *array = calloc(4, sizeof *array);
            volatile float large = 1e20f * (float)argc;
            if (which == 0) { free(array); return array[argc]; }
            if (which == 1) return 1 << (30 + argc);
            return (int)large;
        }
        """,
        encoding="utf-8",
    )
    program = tmp_path / "wrong"
    subprocess.run(["cc", *programs.SANITIZERS["address"], str(source), "-o", str(program)], check=True)
    for which, expected in ((0, "heap-use-after-free"), (1, "shift"), (2, "outside the range")):
        done = programs.run(program, str(which))
        assert done.returncode != 0
        assert expected in done.stderr


@pytest.mark.parametrize("name", programs.PROTOCOL)
def test_one_thread_stops_at_the_worst_place(folder: Path, name: str) -> None:
    done = programs.run(programs.build(folder, "protocol", "address"), name)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", programs.EDGES)
def test_a_process_at_its_limits(folder: Path, name: str) -> None:
    done = programs.run(programs.build(folder, "edges", "address"), name)
    assert done.returncode == 0, done.stderr


def test_forks_beside_a_crew_are_clean(folder: Path) -> None:
    done = programs.run(programs.build(folder, "forks", "address"), "200")
    assert done.returncode == 0, done.stderr


def test_kernels_and_codecs_are_clean(folder: Path) -> None:
    done = programs.run(programs.build(folder, "kernels", "address"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("policy", "optimizer", "bf16", "threads"), [("asp", "momentum", "0", "3"), ("bsp", "adamw", "1", "1")]
)
def test_torture_is_clean(folder: Path, policy: str, optimizer: str, bf16: str, threads: str) -> None:
    program = programs.build(folder, "torture", "address")
    done = programs.run(program, policy, optimizer, "40", "7", "4", "2", "100", "1", bf16, threads, "0")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("policy", "crew", "isa"),
    sampled(
        [
            ("asp", "1", ""),
            ("asp", "2", ""),
            ("asp", "1", "scalar"),
            ("bsp", "3", ""),
            ("bsp", "1", "scalar"),
            ("r2sp", "2", ""),
            ("ssp", "1", ""),
        ],
        1,
        3,
    ),
)
def test_participants_as_threads_of_one_mapping_race_nowhere(
    threads: Path, policy: str, crew: str, isa: str
) -> None:
    rounds = str(examples(100, 400))
    done = programs.run(programs.build(threads, "threads", "thread"), policy, rounds, crew, PYPS_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{policy}: version " in done.stdout


@pytest.mark.parametrize("name", programs.PROTOCOL)
def test_the_worst_places_race_nowhere(threads: Path, name: str) -> None:
    done = programs.run(programs.build(threads, "protocol", "thread"), name)
    assert done.returncode == 0, done.stderr


MUTATIONS = {
    "a buffer is free without a look at the hazards": programs.Change(
        "store/buffers.c",
        "if (buffer_has_reader(s, buffer)) return false;",
        "",
    ),
    "staging is free without a look at the hazards": programs.Change(
        "store/push.c",
        "bool read = s->own_staging[staging].ticket && ",
        "bool read = false && ",
    ),
}


@pytest.mark.parametrize("what", sampled(MUTATIONS))
def test_a_hazard_left_out_is_a_race_that_is_found(threads: Path, what: str) -> None:
    program = programs.build(threads, "threads", "thread", change=MUTATIONS[what])
    done = programs.run(program, "asp", "4000", "1")
    assert done.returncode == 99, done.stdout + done.stderr
    assert "data race" in done.stderr
