"""The pages of the site for mkdocs: README.md is the first, the reference is made, and links to source files
become their names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import make_reference
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_pre_build(config: Any) -> None:
    """Write the reference into docs/, unless the environment says that it is there."""
    if "REFERENCE_IS_MADE" not in os.environ:
        make_reference.write()


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page, with its links as they are from docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace each link to a file that the site does not have by its text."""
    folder = os.path.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        text, target, _ = link.groups()
        known = ":" in target or files.get_file_from_path(os.path.normpath(os.path.join(folder, target)))
        return link[0] if known else text

    return LINK.sub(replaced, markdown)
