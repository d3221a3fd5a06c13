"""`python -m pyps.formats` writes the JSON schemas that the package publishes, into this folder."""

from __future__ import annotations

from pathlib import Path

from pyps.formats import schema, write_json

FOLDER = Path(__file__).parent / "schemas"
PUBLISHED = ("checkpoint", "cluster", "plan", "profile", "noise")


def schema_file(name: str) -> Path:
    """Where the schema of a format lies."""
    return FOLDER / f"{name}.schema.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PUBLISHED:
        write_json(schema_file(name), schema(name))
