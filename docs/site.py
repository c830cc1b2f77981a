"""Hook of MkDocs: builds the site from the documents where they are.

Pages link to each other, to pictures and to result files by paths relative to the repository, as a reader of the
repository needs it. The hook copies the documents and every file that one of them links to into a folder with the same
layout and makes it the source of the site. Links to folders and to source code become plain text.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SHOWN = {".md", ".png", ".svg", ".json", ".html"}


def on_config(config: Any) -> Any:
    """Copy the documents and what they link to; expand folders of the navigation."""
    source = Path(tempfile.mkdtemp(prefix="lantern-docs-"))
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "assets/lantern-emoji/README.md"]
    for page in pages:
        linked = (target(page, found[3]) for found in LINK.finditer(page.read_text(encoding="utf-8")))
        for path in (page, *(path for path in linked if path is not None)):
            (source / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, source / path.relative_to(ROOT))
    config.docs_dir = str(source)
    config.nav = [expanded(entry, source) for entry in config.nav]
    return config


def expanded(entry: Any, source: Path) -> Any:
    """Return an entry of the navigation, a folder replaced by its pages."""
    if not isinstance(entry, dict):
        return entry
    ((title, place),) = entry.items()
    if isinstance(place, str) and (source / place).is_dir():
        place = [path.relative_to(source).as_posix() for path in sorted((source / place).glob("*.md"))]
    return {title: place}


def target(page: Path, link: str) -> Path | None:
    """Return the file of the repository that a link leads to, None if it leads elsewhere or to no shown kind."""
    path = (page.parent / link.split("#")[0]).resolve()
    shown = (
        path.is_file() and path.is_relative_to(ROOT) and (path.suffix in SHOWN or path.name in ("LICENSE", "NOTICE"))
    )
    return path if shown else None


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to folders and source files by their text."""
    original = ROOT / page.file.src_uri

    def kept(found: re.Match[str]) -> str:
        link = found[3]
        is_elsewhere = "://" in link or link.startswith(("#", "mailto:"))
        return found[0] if is_elsewhere or target(original, link) is not None else found[2]

    return LINK.sub(kept, markdown)


def on_post_build(config: Any) -> None:
    """Remove the copies."""
    shutil.rmtree(config.docs_dir)
