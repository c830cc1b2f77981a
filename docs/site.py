"""Hook of MkDocs: builds the site from the documents where they are.

Pages link to each other, to pictures and to result files by paths relative to the repository, as its reader needs it.
The hook copies pages into a folder with the layout of docs/ and adjusts their links. Pictures and result files that
they link to go to `files/`; links to folders and to source code become plain text.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SHOWN = {".png", ".svg", ".json"}
# Pages that are not in docs/, and what a link to README shows instead.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "assets/lantern-emoji/README.md": "model-card.md",
}


def on_config(config: Any) -> Any:
    """Copy the pages, the theme and what pages link to; make the copies the source of the site."""
    source = Path(tempfile.mkdtemp(prefix="lantern-docs-"))
    shutil.copytree(ROOT / "docs" / "theme", source / "theme")
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES if name != "README.md")]
    for page in pages:
        (source / place(page)).parent.mkdir(parents=True, exist_ok=True)
        (source / place(page)).write_text(with_links(page, source), encoding="utf-8")
    config.docs_dir = str(source)
    return config


def place(path: Path) -> str:
    """Return where a file of the repository is in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/") and path.suffix == ".md":
        return name.removeprefix("docs/")
    return PAGES.get(name, f"files/{name}")


def with_links(page: Path, source: Path) -> str:
    """Return the text of a page with the links of the site; copy the files that it links to."""

    def changed(found: re.Match[str]) -> str:
        mark, text, link = found.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return found[0]
        name, _, anchor = link.partition("#")
        path = Path(os.path.normpath(page.parent / name))
        if not path.is_file() or (path.suffix not in SHOWN and not is_page(path)):
            return text
        copy = source / place(path)
        if not is_page(path):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        link = os.path.relpath(place(path), Path(place(page)).parent)
        return f"{mark}[{text}]({link}{'#' if anchor else ''}{anchor})"

    return LINK.sub(changed, page.read_text(encoding="utf-8").removeprefix(front_matter(page)))


def is_page(path: Path) -> bool:
    """Return whether a file is a page of the site."""
    return place(path) in PAGES.values() or (path.is_relative_to(ROOT / "docs") and path.suffix == ".md")


def front_matter(page: Path) -> str:
    """Return the metadata at the head of a model card, which MkDocs would read as its own."""
    found = re.match(r"---\n.*?\n---\n", page.read_text(encoding="utf-8"), re.S)
    return found[0] if found else ""


def on_post_build(config: Any) -> None:
    """Remove the copies."""
    shutil.rmtree(config.docs_dir)
