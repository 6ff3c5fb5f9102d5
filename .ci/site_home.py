"""A hook of mkdocs: the home page of the site is README.md, whose links start at the root of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> None:
    """Adds the home page."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    # Pages of docs/ are beside the home page. Other links leave the site, as those of the pages do.
    text = re.sub(r"\]\((?!https?:)", "](../", text).replace("](../docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
