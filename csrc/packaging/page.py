"""The package's page, as registries show it: README.md with links that lead somewhere from there.

    python csrc/packaging/page.py        prints it

With `Repository` in [project.urls] they lead into that repository, at the version's tag. Before there is an
address a link becomes its text, and a picture goes.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!\w+://)([^)\s]+)\)")
PICTURE = re.compile(rf"{IMAGE.pattern}(?:\n.+)*\n*")  # with its caption
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+://)([^)\s]+)\)")
COMMENT = re.compile(r"<!-- .*? -->\n?")


def package_page(root: Path = ROOT) -> str:
    """Markdown, of the repository in `root`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")
    text = COMMENT.sub("", (root / "README.md").read_text(encoding="utf-8"))
    if not repository:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    at = f"v{project['version']}"
    text = IMAGE.sub(rf"![\1]({repository}/raw/{at}/\2)", text)
    text = re.sub(r"\]\(#", "](README.md#", text)
    return LINK.sub(rf"[\1]({repository}/blob/{at}/\2)", text)


if __name__ == "__main__":
    print(package_page(), end="")
