"""Starts the commands of `pyps`, once it is sure that the package `pyps` is this one.

Registries have another program named `pyps` (it talks to Photoshop). Installed after this one it overwrites
pyps/__init__.py, and pip says nothing. This module stands beside the package, so it still runs then.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "pyps-train"
OUR_FIRST_LINE = '"""pyps: train on devices of unequal speed.'  # of pyps/__init__.py


def others() -> list[str]:
    """Name the installed distributions that claim pyps/__init__.py too, such as ["pyps 0.6.0"]."""
    found = {
        f"{one.name} {one.version}"
        for one in distributions()
        if one.name != DISTRIBUTION and any(str(file) == "pyps/__init__.py" for file in one.files or ())
    }
    return sorted(found)


def installed_from() -> str:
    """Return what pip installed this program from: a clone's folder, a wheel's path, or its registry name.

    pip has noted it (PEP 610).
    """
    try:
        noted = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        noted = None
    if noted and (url := json.loads(noted).get("url", "")).startswith("file://"):
        return unquote(urlsplit(url).path)
    return DISTRIBUTION


def main() -> None:
    """Run `pyps COMMAND ...`. Exits."""
    _started("main")


def main_plan() -> None:
    """Run `pyps-plan ...`. Exits."""
    _started("main_plan")


def main_profile() -> None:
    """Run `pyps-profile ...`. Exits."""
    _started("main_profile")


def _started(name: str) -> None:
    if not _is_this_one():
        sys.exit(2)
    import pyps.cli

    getattr(pyps.cli, name)()


def _is_this_one() -> bool:
    """Say in one message on stderr what has overwritten the package, if anything has."""
    spec = importlib.util.find_spec("pyps")
    source = Path(spec.origin).read_text(encoding="utf-8", errors="replace") if spec and spec.origin else ""
    if source.startswith(OUR_FIRST_LINE):
        return True
    place = spec.origin if spec else sys.prefix
    clash = ", ".join(others()) or "another program"
    mend = f"pip uninstall -y pyps; pip install --force-reinstall --no-deps '{installed_from()}'"
    print(f"pyps: {clash} has overwritten the package `pyps` in {place}. Mend it: {mend}", file=sys.stderr)
    return False
