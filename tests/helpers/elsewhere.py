"""Hides what a Mac or a Windows machine lacks: run as `python elsewhere.py SCRIPT ...`, or imported first.

The compiled core, modules and functions of Unix; torch and the standard library have been imported before.
"""

from __future__ import annotations

import importlib.abc
import multiprocessing.util  # noqa: F401
import os
import runpy
import subprocess  # noqa: F401
import sys

import torch
import torch.distributed
import torch.utils.data  # noqa: F401

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pyps._native")
FUNCTIONS = ("register_at_fork", "getuid", "geteuid", "sched_getaffinity", "posix_fallocate", "mkfifo")
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY")


class Missing(importlib.abc.MetaPathFinder):
    """Finds no module of MODULES."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide() -> None:
    """Hide all of it in this process."""
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing())
    for name in (*FUNCTIONS, *FLAGS):
        delattr(os, name)


if __name__ == "__main__":
    hide()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
