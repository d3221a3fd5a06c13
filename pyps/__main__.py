"""python -m pyps: the commands, and where the C library lies for those who link it.

cc trainer.c $(python -m pyps --cflags --libs) -o trainer
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ANSWERS = {
    "--cflags": f"-I{PACKAGE / 'include'}",
    "--libs": f"-L{PACKAGE / 'lib'} -lpyps -Wl,-rpath,{PACKAGE / 'lib'}",
    "--static-libs": f"{PACKAGE / 'lib' / 'libpyps.a'} -lm -lpthread",
    "--includedir": str(PACKAGE / "include"),
    "--libdir": str(PACKAGE / "lib"),
    "--cmakedir": str(PACKAGE / "lib" / "cmake" / "pyps"),
    "--pkgconfigdir": str(PACKAGE / "lib" / "pkgconfig"),
}


def main() -> None:
    """Answer the questions, in their order on one line; anything else is a command of `pyps`. Exits."""
    questions = sys.argv[1:]
    if questions == ["--version"]:
        print(version("pyps-train"))
    elif questions and all(question in ANSWERS for question in questions):
        print(*(ANSWERS[question] for question in questions))
    else:
        from pyps.cli import main as commands

        commands()


if __name__ == "__main__":
    main()
