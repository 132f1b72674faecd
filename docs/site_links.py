"""Links of the site (a hook of MkDocs): files of the repository outside docs/ become pages too.

    docs/a.md -> ../CONTRIBUTING.md       project/contributing.md, in the menu under "Project"
    docs/a.md -> ../examples/lenet.py     source/examples/lenet.py.md: the file as a block of code
    CONTRIBUTING.md -> docs/a.md          a.md

So one relative link works in the repository and on the site, and the site needs no address of a
repository. A link to a file that does not exist is a warning, which `mkdocs build --strict` makes
an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PROJECT = {  # path in the repository -> page of the site, in the order of the menu
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".ipynb": "json", ".cff": "yaml"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)

log = logging.getLogger("mkdocs.plugins.site_links")
_places: dict[str, str] = {}  # page of the site -> path in the repository, of what is not in docs/


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    titles = {page: Path(page).stem.capitalize() for page in PROJECT.values()}
    config.nav.append({"Project": [{title: page} for page, title in titles.items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the project's pages, and a page for every file of the repository that a page links to."""
    _places.clear()
    _places.update({page: path for path, page in PROJECT.items()})
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages |= {path: (ROOT / path).read_text() for path in PROJECT}
    for path, text in pages.items():
        for _, target, _ in LINK.findall(FENCE.sub("", text)):
            linked = _in_repository(path, target.partition("#")[0])
            if linked and not linked.startswith("docs/") and linked not in PROJECT:
                _places.setdefault(f"source/{linked}.md", linked)
    for page, path in _places.items():
        if (ROOT / path).is_file():
            files.append(File.generated(config, page, content=_content(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what lies outside docs/, and links of pages from there, as links of the site."""
    uri = page.file.src_uri
    here = _places.get(uri, f"docs/{uri}")
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown

    def site_link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        path = _in_repository(here, target)
        if path is None:
            return found[0]
        there = _site_page(path)
        if there is None:
            log.warning(f"'{here}' links to '{found[2]}', and there is no file '{path}'")
            return found[0]
        link = posixpath.relpath(there, posixpath.dirname(uri) or ".")
        return f"{found[1]}{link}{hash_}{anchor}{found[3]}"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(site_link, part) for part in parts)


def _in_repository(here: str, target: str) -> str | None:
    """The path in the repository that a link of `here` names; None: an address or an anchor."""
    if not target or target.startswith("#") or "://" in target or target.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), target))


def _site_page(path: str) -> str | None:
    """The page of the site for a path in the repository; None: there is no such file."""
    if path.startswith("docs/"):
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        return path.removeprefix("docs/") if (ROOT / path).is_file() else None
    if path in PROJECT:
        return PROJECT[path]
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def _content(path: str) -> str:
    text = (ROOT / path).read_text()
    if path in PROJECT:
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# `{path}`\n\n````{language}\n{text}\n````\n"
