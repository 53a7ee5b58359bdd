"""Make links to files outside ``docs/`` work on the site as they do in the repository.

A page may link to ``../CHANGELOG.md``, ``../examples/kubernetes`` or
``../benchmarks/results/p2p.json``. For the site, this MkDocs hook adds each linked file
at its path in the repository, and rewrites the link:

* Markdown becomes a page; its own links are followed, too.
* Source (``.py``, ``.yaml``, …) becomes a page that shows it.
* A folder becomes its ``README.md``, or a page that lists its files.
* Everything else (pictures, results) is copied.

A navigation entry that ends in ``/*`` stands for all pages of that folder, in order.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LINK = re.compile(
    r"""(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))|(?<=<img src=")([^"]+)(?=")"""
)
"""Target and anchor of a link in Markdown, or the source of a picture in HTML."""

FENCE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}

README = "readme.md"
"""Page of the repository's README; MkDocs would take ``README.md`` for the index."""

_sources: dict[str, str] = {}
"""The repository path of each page that was added, by its path on the site."""


def on_config(config: Any) -> Any:
    """Expand the navigation's ``folder/*`` entries."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to outside ``docs/``."""
    _sources.clear()
    waiting = [
        (f"docs/{file.src_uri}", Path(str(file.abs_src_path)).read_text())
        for file in files.documentation_pages()
    ]
    waiting += [
        _add(files, config, name)
        for name in _nav_files(config.nav)
        if name == README or (ROOT / name).exists()
    ]
    while waiting:
        source, text = waiting.pop()
        for target in _targets(source, text):
            is_outside = (
                not target.startswith(("docs/", "..")) and target != "README.md"
            )
            here = _site_path(target)
            is_known = files.get_file_from_path(here) is not None
            if not is_outside or is_known or not (ROOT / target).exists():
                continue
            if here.endswith(".md"):
                waiting.append(_add(files, config, here))
            else:
                source_path = str(ROOT / target)
                files.append(File.generated(config, here, abs_src_path=source_path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to where their targets are on the site."""
    here = page.file.src_uri
    source = _sources.get(here, f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = match[1] or match[3], match[2] or ""
        if _is_external(target):
            return match[0]
        there = _site_path(_resolved(source, target))
        return posixpath.relpath(there, posixpath.dirname(here) or ".") + anchor

    return _outside_code(markdown, lambda text: LINK.sub(rewritten, text))


def _add(files: Files, config: Any, name: str) -> tuple[str, str]:
    """Add a page for a file or folder of the repository; return its path and text."""
    text = _page(name)
    in_nav = name in _nav_files(config.nav)
    level = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
    files.append(File.generated(config, name, content=text, inclusion=level))
    _sources[name] = "README.md" if name == README else name
    return _sources[name], text


def _page(name: str) -> str:
    path = ROOT / ("README.md" if name == README else name)
    if path.exists():
        return path.read_text()
    if path.name == "index.md":
        rows = "".join(
            f"- [`{inner.name}`]({inner.name})\n"
            for inner in sorted(path.parent.iterdir())
            if inner.is_file()
        )
        return f"# {posixpath.dirname(name)}\n\n{rows}"
    shown = path.with_suffix("")
    code = shown.read_text().rstrip()
    title = name.removesuffix(".md")
    return f"# {title}\n\n````{LANGUAGES[shown.suffix]}\n{code}\n````\n"


def _site_path(target: str) -> str:
    """Return where a file of the repository is among the site's sources."""
    if target == "README.md":
        return README
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    path = ROOT / target
    if path.is_dir():
        has_readme = (path / "README.md").exists()
        return f"{target}/README.md" if has_readme else f"{target}/index.md"
    return f"{target}.md" if path.suffix in LANGUAGES else target


def _resolved(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _is_external(target: str) -> bool:
    return "://" in target or target.startswith(("mailto:", "/"))


def _targets(source: str, text: str) -> list[str]:
    found: list[str] = []

    def collected(part: str) -> str:
        found.extend(match[1] or match[3] for match in LINK.finditer(part))
        return part

    _outside_code(text, collected)
    return [_resolved(source, target) for target in found if not _is_external(target)]


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = FENCE.split(text)
    return "".join(p if n % 2 else change(p) for n, p in enumerate(parts))


def _nav_files(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [name for one in inner for name in _nav_files(one)]


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(inner, docs) for title, inner in nav.items()}
    if isinstance(nav, list):
        return [_expanded(inner, docs) for inner in nav]
    if nav.endswith("/*"):
        pages = sorted((docs / nav[:-2]).glob("*.md"))
        return [page.relative_to(docs).as_posix() for page in pages]
    return nav
