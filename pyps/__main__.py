"""python -m pyps: the commands of `pyps`, and the compiler flags for programs that link the C library.

cc trainer.c $(python -m pyps --cflags --libs) -o trainer
cc trainer.c $(python -m pyps --cflags --libs --static) -o trainer
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
STATIC = "--static"  # as in pkg-config: changes what --libs prints
FLAGS = {
    "--cflags": f"-I{PACKAGE / 'include'}",
    "--libs": f"-L{PACKAGE / 'lib'} -lpyps -Wl,-rpath,{PACKAGE / 'lib'}",
    "--static-libs": f"{PACKAGE / 'lib' / 'libpyps.a'} -lm -lpthread",
    "--includedir": str(PACKAGE / "include"),
    "--libdir": str(PACKAGE / "lib"),
    "--cmakedir": str(PACKAGE / "lib" / "cmake" / "pyps"),
    "--pkgconfigdir": str(PACKAGE / "lib" / "pkgconfig"),
}


def flags_for(options: list[str]) -> list[str] | None:
    """Return what to print for these options, in their order; None if one is unknown."""
    wanted = [option for option in options if option != STATIC]
    if not wanted or any(option not in FLAGS for option in wanted):
        return None
    libs = "--static-libs" if STATIC in options else "--libs"
    return [FLAGS[libs if option == "--libs" else option] for option in wanted]


def main() -> None:
    """Print flags on one line; other arguments are a command of `pyps`. Exits."""
    if sys.argv[1:] == ["--version"]:
        print(version("pyps-train"))
    elif found := flags_for(sys.argv[1:]):
        print(*found)
    else:
        from pyps.cli import main as commands

        commands()


if __name__ == "__main__":
    main()
