"""Look for new inputs that matter, with clang's libFuzzer, and keep those that reach new code in the corpus.

    python tests/c/libfuzzer.py attach|decode|journal [--seconds 60]

Ends with libFuzzer's report if an input does harm; that input is then the file named there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import programs

LONGEST_BYTES = {"attach": 120, "decode": 600, "journal": 120}


def main() -> int:
    """Build, fuzz, minimize; the exit code is libFuzzer's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("of", choices=programs.FUZZED)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    seeds = programs.corpus(options.of)
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), Path(name, "program")
        old, new = folder / "old", folder / "new"
        flags = [*programs.FLAGS, "-DPYPS_FAILPOINTS", "-O1"]
        flags += [f"-fsanitize=fuzzer,address,{programs.UNDEFINED}", "-fno-sanitize-recover=all"]
        sources = [*sorted(programs.CSRC.rglob("*.c")), programs.C / f"fuzz_{options.of}.c"]
        subprocess.run(
            ["clang", *flags, *map(str, sources), "-o", str(program), "-lm", "-lpthread"], check=True
        )
        for path in (old, new):
            path.mkdir()
        for index, line in enumerate(seeds.read_text(encoding="ascii").splitlines()):
            (old / str(index)).write_bytes(bytes.fromhex(line))
        length = f"-max_len={LONGEST_BYTES[options.of]}"
        fuzz = [str(program), length, "-timeout=10", f"-max_total_time={options.seconds}", str(old)]
        if code := subprocess.run(fuzz, check=False).returncode:
            return code
        subprocess.run([str(program), length, "-set_cover_merge=1", str(new), str(old)], check=True)
        kept = sorted({path.read_bytes().hex() for path in new.iterdir()} - {""})
    seeds.write_text("".join(f"{line}\n" for line in kept), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
