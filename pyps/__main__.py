"""python -m pyps: the commands, and where the C library lies for those who link it.

cc trainer.c $(python -m pyps --cflags --libs) -o trainer
cc trainer.c $(python -m pyps --cflags --libs --static) -o trainer
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
STATIC = "--static"  # as in pkg-config: no answer of its own, it changes that to --libs
ANSWERS = {
    "--cflags": f"-I{PACKAGE / 'include'}",
    "--libs": f"-L{PACKAGE / 'lib'} -lpyps -Wl,-rpath,{PACKAGE / 'lib'}",
    "--static-libs": f"{PACKAGE / 'lib' / 'libpyps.a'} -lm -lpthread",
    "--includedir": str(PACKAGE / "include"),
    "--libdir": str(PACKAGE / "lib"),
    "--cmakedir": str(PACKAGE / "lib" / "cmake" / "pyps"),
    "--pkgconfigdir": str(PACKAGE / "lib" / "pkgconfig"),
}


def answers(questions: list[str]) -> list[str] | None:
    """The answers in the order of the questions; None if these are no questions of ours."""
    asked = [question for question in questions if question != STATIC]
    if not asked or any(question not in ANSWERS for question in asked):
        return None
    libs = "--static-libs" if STATIC in questions else "--libs"
    return [ANSWERS[libs if question == "--libs" else question] for question in asked]


def main() -> None:
    """Answer the questions on one line; anything else is a command of `pyps`. Exits."""
    if sys.argv[1:] == ["--version"]:
        print(version("pyps-train"))
    elif found := answers(sys.argv[1:]):
        print(*found)
    else:
        from pyps.cli import main as commands

        commands()


if __name__ == "__main__":
    main()
