"""Hooks of mkdocs: README.md is the home page, links out of docs/ become text, and a dead link fails the build."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: Any) -> None:
    """Adds the home page."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    # README.md's links start at the root of the repository, and pages of docs/ are beside the home page.
    text = re.sub(r"\]\((?!https?:|#)", "](../", text).replace("](../docs/", "](")
    text = re.sub(r'\b(src|srcset)="docs/', r'\1="', text)
    files.append(File.generated(config, "index.md", content=text))


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Returns a page whose links to files that the site lacks (samples, results) are their texts."""
    return re.sub(r"\[((?:[^][]|\[[^][]*\])+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_post_build(config: Any) -> None:
    """Fails if a page of the site has a dead link, or loads a file of another site."""
    if bad := bad_links(Path(config.site_dir)):
        raise BuildError("dead links, or files of other sites:\n" + "\n".join(bad))


class Links(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []  # (tag, address)
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps what the tag names and links."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append((tag, value))


def bad_links(site: Path) -> list[str]:
    """Returns "page: address" for each link to a file or anchor that `site` lacks, and each file of another site."""
    pages = {path.resolve(): Links(path) for path in sorted(site.rglob("*.html"))}
    bad = []
    for path, page in pages.items():
        for tag, address in page.links:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") or parts.netloc:
                good = tag == "a"
            elif parts.scheme:  # mailto, data
                good = True
            else:
                folder = site if parts.path.startswith("/") else path.parent  # 404.html's links start at the root
                target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                anchors = pages[target].anchors if target in pages else {parts.fragment}
                good = target.is_file() and (not parts.fragment or unquote(parts.fragment) in anchors)
            if not good:
                bad.append(f"{path.relative_to(site.resolve())}: {address}")
    return bad
