"""The C library as others meet it: installed from the wheel, found, linked, trained with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps import BSP, Hyper, Store, native
from pyps.errors import Ended, Fenced, TimedOut

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test builds the wheel

ROOT = Path(__file__).resolve().parents[2]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
NEEDS_CXX = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With the unpacked wheel before everything else, as if it were installed."""
    home = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    return {**os.environ, "PYTHONPATH": str(home), "HOME": str(home)}


def run(environment: dict[str, str], *command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def ask(environment: dict[str, str], *questions: str) -> list[str]:
    elsewhere = Path(environment["HOME"])  # -m looks first where it is run
    return run(environment, sys.executable, "-m", "pyps", *questions, cwd=elsewhere).split()


def copied(example: str, tmp_path: Path) -> Path:
    folder = tmp_path / example
    shutil.copytree(ROOT / "examples" / example, folder, ignore=shutil.ignore_patterns("trainer"))
    return folder


def declared() -> set[str]:
    text = (ROOT / "csrc" / "pyps.h").read_text()
    return set(re.findall(r"PYPS_API [^;(]*?(pyps_\w+)\(", text))


@pytest.mark.parametrize(
    ("compiler", "standard", "suffix"),
    [("cc", "c11", "c"), pytest.param("g++", "c++17", "cpp", marks=NEEDS_CXX)],
)
def test_the_header_stands_alone(
    environment: dict[str, str], tmp_path: Path, compiler: str, standard: str, suffix: str
) -> None:
    (include,) = ask(environment, "--includedir")
    assert include.startswith(environment["PYTHONPATH"])
    source = tmp_path / f"alone.{suffix}"
    source.write_text("#include <pyps.h>\nint main(void) { return pyps_abi_version() != PYPS_ABI; }\n")
    flags = ask(environment, "--cflags", "--libs")
    program = str(tmp_path / suffix)
    run(environment, compiler, f"-std={standard}", *STRICT, str(source), *flags, "-o", program)
    run(environment, program)


def test_exactly_the_header_is_exported(environment: dict[str, str]) -> None:
    (lib,) = ask(environment, "--libdir")
    abi = native.abi_version()
    listed = run(environment, "nm", "-D", "--defined-only", f"{lib}/libpyps.so.{abi}")
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines()} - {f"PYPS_{abi}"}
    assert names == declared()
    assert len(names) > 25
    dynamic = run(environment, "readelf", "-d", f"{lib}/libpyps.so.{abi}")
    assert f"Library soname: [libpyps.so.{abi}]" in dynamic, "a program of another ABI would still start"


@pytest.mark.parametrize(
    ("example", "policy"), [("c", "bsp"), pytest.param("cpp", "asp", marks=[NEEDS_CXX, pytest.mark.thorough])]
)
def test_the_examples_train(
    environment: dict[str, str], shm: Path, tmp_path: Path, example: str, policy: str
) -> None:
    folder, environment = copied(example, tmp_path), {**environment, "PYPS_SHM_DIR": str(shm)}
    run(environment, "make", "-C", str(folder), f"PYTHON={sys.executable}", "trainer")
    train = str(ROOT / "examples" / "c" / "train.py")
    said = run(environment, sys.executable, train, "--trainer", str(folder / "trainer"), "--policy", policy)
    assert re.search(rf"20000 samples under {policy}: 9[5-9]\.\d%", said)
    assert not list(shm.iterdir())


LATE = """
#undef pyps_pull
#include <pyps.h>
#include <unistd.h>

int late_pull(pyps_store *store, float *weights, uint64_t *version);
int late_pull(pyps_store *store, float *weights, uint64_t *version) {
    static int calls;
    if (calls++ == 1) usleep(1000000);
    return pyps_pull(store, weights, version);
}
"""


def test_an_example_that_was_too_late_rejoins(environment: dict[str, str], shm: Path, tmp_path: Path) -> None:
    """It was fenced after its claim, before its pull."""
    program, late, data = (str(tmp_path / name) for name in ("trainer", "late.c", "data"))
    Path(late).write_text(LATE)
    Path(data).write_bytes(np.array([4, 1], np.int32).tobytes() + bytes(4 * 2 * 4))
    flags = ask(environment, "--cflags", "--libs")
    source = str(ROOT / "examples" / "c" / "trainer.c")
    run(environment, "cc", "-Dpyps_pull=late_pull", source, late, *flags, "-lm", "-o", program)
    options: dict[str, Any] = {"batches": [2, 2], "policy": BSP(round_timeout_seconds=0.5), "samples": 24}
    with Store.create("late", {"weights": np.zeros(1), "bias": np.zeros(1)}, **options) as store:
        store.join(0)
        command, env = [program, "late", data, "1"], {**environment, "PYPS_SHM_DIR": str(shm)}
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as trainer:
            push_to_the_end(store)
            _, said = trainer.communicate(timeout=60)
        assert (trainer.returncode, said) == (0, "")


def push_to_the_end(store: Store) -> None:
    """Steps of a gradient of zero, while there are samples."""
    zeros = np.zeros(store.layout.flat_elements, np.float32)
    while True:
        try:
            claim = store.start()
            store.pull()
            store.push(None, claim.count, Hyper(lr=0.1), gradient=zeros)
        except TimedOut:  # the trainer begins
            continue
        except Fenced:
            store.rejoin()
        except Ended:
            return


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="needs pkg-config")
def test_pkg_config_finds_it(environment: dict[str, str], tmp_path: Path) -> None:
    (folder,) = ask(environment, "--pkgconfigdir")
    found = {**environment, "PKG_CONFIG_PATH": folder}
    flags = run(found, "pkg-config", "--cflags", "--libs", "pyps").split()
    version = run(found, "pkg-config", "--modversion", "pyps")
    assert [version] == ask(environment, "--version")
    program = str(tmp_path / "trainer")
    run(environment, "cc", str(ROOT / "examples" / "c" / "trainer.c"), *flags, "-lm", "-o", program)
    run({**environment, "LD_LIBRARY_PATH": ""}, "ldd", program)


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
@pytest.mark.parametrize("example", ["c", pytest.param("cpp", marks=NEEDS_CXX)])
def test_cmake_finds_it(environment: dict[str, str], tmp_path: Path, example: str) -> None:
    folder = copied(example, tmp_path)
    (config,) = ask(environment, "--cmakedir")
    run(environment, "cmake", "-S", str(folder), "-B", str(folder / "build"), f"-Dpyps_DIR={config}")
    run(environment, "cmake", "--build", str(folder / "build"))
    assert subprocess.run([folder / "build" / "trainer"]).returncode == 2  # it says how to use it


def test_the_static_library_needs_no_other(environment: dict[str, str], tmp_path: Path) -> None:
    program = str(tmp_path / "trainer")
    flags = ask(environment, "--cflags", "--static-libs")
    run(environment, "cc", str(ROOT / "examples" / "c" / "trainer.c"), *flags, "-o", program)
    assert "libpyps" not in run(environment, "ldd", program)


GO_ON = """
#include <stdio.h>
#include <stdlib.h>

static void must(int rc) {
    if (rc == PYPS_OK) return;
    fprintf(stderr, "%s\\n", pyps_error_message());
    exit(1);
}

static void half(const pyps_claim *claim, const float *weights, float *gradient) {
    for (int i = 0; i < 5; i++) gradient[i] = weights[i] / 2 + (float)claim->first + (float)(i + 1);
}

int main(void) {
    static float weights[2048], vectors[2][2048], again[2048];
    float *states[2] = {vectors[0], vectors[1]};
    uint32_t batch = 3;
    uint64_t version;
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {5}};
    pyps_config config = {.size = sizeof config, .chunk_params = 1024, .optimizer = PYPS_ADAMW,
                          .policy = PYPS_ASP, .ranks = 1, .groups = 1, .tensors = 1,
                          .batches = &batch, .tensor = &tensor};
    pyps_store *store, *other;
    must(pyps_create("first", PYPS_ABI, &config, &store));
    must(pyps_join(store, PYPS_WORKER, 0, NULL));
    for (int k = 0; k < 3; k++) must(one_step(store, weights, half));
    config.chunk_params = 2048;
    must(go_on(store, weights, states, "second", config, &other));
    must(pyps_join(other, PYPS_WORKER, 0, NULL));
    for (int k = 0; k < 3; k++) must(one_step(store, weights, half)), must(one_step(other, weights, half));
    must(pyps_pull(store, weights, &version)), must(pyps_pull(other, again, &version));
    int same = version == 6 && !memcmp(weights, again, 5 * sizeof *weights) && weights[0] != 0;
    must(pyps_close(store)), must(pyps_close(other));
    must(pyps_unlink("first", 0)), must(pyps_unlink("second", 0));
    return !same;
}
"""


def test_the_documented_functions_work(environment: dict[str, str], shm: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "link-c.md").read_text()
    step, go_on = re.findall(r"```c\n(.*?)```", page, re.S)
    source, program = tmp_path / "step.c", str(tmp_path / "step")
    source.write_text("#include <string.h>\n" + step + go_on + GO_ON)
    flags = ask(environment, "--cflags", "--static-libs")
    run(environment, "cc", "-std=c11", *STRICT, str(source), *flags, "-o", program)
    run({**environment, "PYPS_SHM_DIR": str(shm)}, program)


def test_bad_data_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    folder = copied("c", tmp_path)
    run(environment, "make", "-C", str(folder), f"PYTHON={sys.executable}", "trainer")
    (tmp_path / "empty").touch()
    done = subprocess.run(
        [folder / "trainer", "no-such", tmp_path / "empty", "0"], capture_output=True, text=True
    )
    assert (done.returncode, "expected rows" in done.stderr) == (2, True)
