"""Builds the C core (csrc) as pyps._native; everything else is declared in pyproject.toml."""

import platform
import sys

from setuptools import setup

MACHINES = ("x86_64", "amd64", "aarch64", "arm64")

if not sys.platform.startswith("linux") or platform.machine().lower() not in MACHINES:
    sys.exit(
        f"pyps-train builds on Linux x86-64 and aarch64; found {sys.platform} {platform.machine()}. "
        "The store needs futexes, OFD locks and POSIX shared memory as Linux has them."
    )

setup(
    cffi_modules=["csrc/build_ffi.py:ffi"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
