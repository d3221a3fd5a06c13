"""The compiled loops of the kernels: what they need stays in registers.

Vectors wider than a register, and constants for which none is left, lie in memory: up to four times slower.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

REGISTER = {"avx2": "ymm", "avx512": "zmm"}
KERNELS = {  # an instruction of its main loop that no other of its loops has
    "finite": "vsubps",
    "square_sum": "vcvtps2pd",
    "sgd": "vsubps",
    "adam": "vsqrtps",
    "adagrad": "vsqrtps",
}


def has_tools() -> bool:
    """Return whether gcc 12, whose code was looked at, and objdump are here."""
    if platform.machine() != "x86_64" or not (shutil.which("gcc") and shutil.which("objdump")):
        return False
    return subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True).stdout.startswith("12")


pytestmark = pytest.mark.skipif(not has_tools(), reason="needs gcc 12 and objdump for x86-64")


def inner_loops(listing: str, function: str) -> Iterator[list[str]]:
    """The instructions of each loop of a function that has no other in it."""
    body = re.search(rf"^[0-9a-f]+ <{function}>:\n(.*?)(?:\n\n|\Z)", listing, re.M | re.S)
    assert body is not None, function
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s*([0-9a-f]+):\t(.*)$", body[1], re.M)]
    jumps = [(at, re.match(r"j\w+\s+([0-9a-f]+)", text)) for at, text in code]
    loops = [(int(to[1], 16), at) for at, to in jumps if to and code[0][0] <= int(to[1], 16) <= at]
    for first, last in loops:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops):
            yield [text for at, text in code if first <= at <= last]


@pytest.fixture(scope="module")
def listings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The code of each instruction set, with the options of setup.py."""
    flags = re.search(r'^FLAGS = "(.*)"', (programs.CSRC / "build_ffi.py").read_text(), re.M)
    assert flags is not None
    found = {}
    for isa in REGISTER:
        made = Path(tmp_path_factory.mktemp("kernels"), f"{isa}.o")
        source = programs.CSRC / "kernels" / f"kernels_{isa}.c"
        subprocess.run(
            ["gcc", *flags[1].split(), f"-I{programs.CSRC}", "-c", str(source), "-o", str(made)], check=True
        )
        listing = ["objdump", "-d", "--no-show-raw-insn", str(made)]
        found[isa] = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    return found


@pytest.mark.parametrize("isa", REGISTER)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_loop_keeps_its_vectors_in_registers(listings: dict[str, str], isa: str, kernel: str) -> None:
    """Look at the plain one of Adam's loops: the others are for parts of a step, decay and look-ahead."""
    mark = KERNELS[kernel]
    loops = [
        loop for loop in inner_loops(listings[isa], f"{isa}_{kernel}") if any(mark in line for line in loop)
    ]
    wide = [loop for loop in loops if any(REGISTER[isa] in line for line in loop)]
    assert wide, f"no loop with {mark} on {REGISTER[isa]}"
    on_the_stack = [
        [line for line in loop if "mm" in line and re.search(r"\(%r[sb]p", line)] for loop in wide
    ]
    best = min if kernel == "adam" else max
    assert not best(on_the_stack, key=len)
