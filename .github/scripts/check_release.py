"""Check a source distribution and a wheel before they are published.

    python .github/scripts/check_release.py build/dist [--tag v0.1.0]

Checks that the tag, the package, the changelog and the citation name one version, and
that the wheel contains all of the library and nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
SHIPPED = (".py", ".yaml", ".typed")
"""Suffixes of the library's files."""


def one(folder: Path, pattern: str) -> Path:
    """Return the only file in ``folder`` that matches ``pattern``.

    Raises:
        SystemExit: There is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} files {pattern}; expected one")
    return found[0]


def version_problems(version: str, tag: str | None) -> list[str]:
    """Return where another version than ``version`` is named."""
    problems = []
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag is {tag}, but the package's version is {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if section is None:
        problems.append(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD'")
    elif not re.search(r"\bcommit `[0-9a-f]{7,40}`", section[1]):
        problems.append(f"CHANGELOG.md names no commit in its section of {version}")
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        problems.append(f"CITATION.cff does not have 'version: {version}'")
    return problems


def wheel_problems(wheel: Path) -> list[str]:
    """Return what is missing from the wheel, and what should not be in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    library = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "multiworld").rglob("*")
        if path.suffix in SHIPPED
    }
    problems = [f"{wheel.name} lacks {name}" for name in sorted(expected - library)]
    problems += [f"{wheel.name} has {name}" for name in sorted(library - expected)]
    for name in ("LICENSE", "NOTICE"):
        if not any(found.endswith(f".dist-info/licenses/{name}") for found in names):
            problems.append(f"{wheel.name} lacks {name}")
    return problems


def sdist_problems(sdist: Path) -> list[str]:
    """Return what the source distribution lacks to build the wheel."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
    return [f"{sdist.name} lacks {name}" for name in needed if name not in names]


def wheel_version(wheel: Path) -> str:
    """Return the version in the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return str(HeaderParser().parsestr(text)["Version"])


def main() -> int:
    """Run the checks; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the distributions")
    parser.add_argument("--tag", help="tag of the release, such as v0.1.0")
    given = parser.parse_args()
    wheel, sdist = one(given.folder, "*.whl"), one(given.folder, "*.tar.gz")
    version = wheel_version(wheel)
    problems = [
        *version_problems(version, given.tag or None),
        *wheel_problems(wheel),
        *sdist_problems(sdist),
    ]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if not problems:
        sys.stdout.write(f"{wheel.name} and {sdist.name} may be published\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
