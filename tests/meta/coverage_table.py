"""Table of ``make coverage``: ``python -m tests.meta.coverage_table``."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build" / "coverage" / "report.json"
EXCLUDED = ROOT / "tests" / "coverage.toml"
LEAST = 90.0
"""Minimum percentage of lines that must run."""


@dataclass
class Lines:
    """Numbers of the lines of one module."""

    ran: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)

    @property
    def percent(self) -> float:
        return percent([self])


def percent(modules: Iterable[Lines]) -> float:
    modules = list(modules)
    ran = sum(len(lines.ran) for lines in modules)
    return 100 * ran / max(1, ran + sum(len(lines.missed) for lines in modules))


def measured(
    report: dict[str, Any], excluded: dict[str, str]
) -> tuple[dict[str, Lines], int, set[str]]:
    """Return the lines that count, the number of those left out, and unknown names."""
    modules, count, unknown = {}, 0, set(excluded)
    for path, file in report["files"].items():
        parts = Path(path).with_suffix("").parts
        parts = parts[parts.index("multiworld") + 1 :]
        name = ".".join(p for p in parts if p != "__init__") or "multiworld"
        lines = Lines(set(file["executed_lines"]), set(file["missing_lines"]))
        outer = {o for o in excluded if f"{name}.".startswith(f"{o}.")}
        if outer:
            unknown -= outer
            count += len(lines.ran) + len(lines.missed)
            continue
        for inner, region in file.get("functions", {}).items():
            if f"{name}:{inner}" in excluded:
                unknown.discard(f"{name}:{inner}")
                left_out = {*region["executed_lines"], *region["missing_lines"]}
                count += len(left_out)
                lines.ran -= left_out
                lines.missed -= left_out
        modules[name] = lines
    return modules, count, unknown


def ranges(numbers: set[int]) -> str:
    """Return line numbers as text such as ``3-5, 9``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def package(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "serve":
        return "/".join(parts[:2]) if len(parts) > 2 else "serve"
    return parts[0]


def main() -> int:
    """Print the table; return 1 below ``LEAST``, or if an excluded name is unknown."""
    report = json.loads(REPORT.read_text())
    excluded = tomllib.loads(EXCLUDED.read_text())
    modules, count, unknown = measured(report, excluded)
    packages: dict[str, list[Lines]] = {}
    for name, lines in modules.items():
        packages.setdefault(package(name), []).append(lines)
    print("Not covered:\n")
    for name, lines in sorted(modules.items()):
        if lines.missed:
            print(f"{lines.percent:5.0f} %  {name}: {ranges(lines.missed)}")
    print(f"\n{'package':24}{'lines':>8}{'ran':>8}{'percent':>9}")
    for name, found in sorted(packages.items()):
        ran = sum(len(lines.ran) for lines in found)
        total = ran + sum(len(lines.missed) for lines in found)
        print(f"{name:24}{total:8}{ran:8}{percent(found):9.1f}")
    reached = percent(modules.values())
    ran = sum(len(lines.ran) for lines in modules.values())
    total = ran + sum(len(lines.missed) for lines in modules.values())
    print(f"{'all':24}{total:8}{ran:8}{reached:9.1f}")
    everything = percent(measured(report, {})[0].values())
    print(f"\n{count} lines are left out by tests/coverage.toml")
    print(f"with them, {everything:.1f} % of the lines ran")
    for name in sorted(unknown):
        print(f"tests/coverage.toml: there is no {name}")
    if reached < LEAST:
        print(f"{reached:.1f} % of the lines ran, and {LEAST:.0f} % must")
    return 1 if unknown or reached < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
