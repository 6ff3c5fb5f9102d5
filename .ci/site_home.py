"""Hooks of mkdocs: the home page of the site is README.md, and links to files outside of docs/ become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: Any) -> None:
    """Adds the home page."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    # README.md's links start at the root of the repository, and pages of docs/ are beside the home page.
    text = re.sub(r"\]\((?!https?:)", "](../", text).replace("](../docs/", "](")
    files.append(File.generated(config, "index.md", content=text))


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Returns a page whose links to files that the site lacks (samples, results) are their texts."""
    return re.sub(r"\[((?:[^][]|\[[^][]*\])+)\]\(\.\./[^)]+\)", r"\1", markdown)
