"""Writes the tables of ``docs/performance.md`` from the results.

``python -m benchmarks.tables``, run in a checkout of the repository, replaces the
text between ``<!-- SUITE: KIND -->`` and ``<!-- end -->`` in the pages. The table has a
row for each contender and a column for each size. The median of the rounds' own ratios
to the suite's baseline is in brackets. ``<!-- SUITE! KIND -->`` makes a table of the
ratios alone, with their 95 % interval.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.samples import BenchReport, Series, interval

RESULTS = Path("benchmarks/results")
PAGES = (Path("docs/performance.md"), Path("docs/serve/performance.md"))
TABLE = re.compile(r"<!-- (\w+)([:!]) ([^>]*) -->\n.*?<!-- end -->", re.DOTALL)


def report_of(suite: str) -> BenchReport:
    """Return the results of a suite."""
    found = json.loads((RESULTS / f"{suite}.json").read_text())
    report = BenchReport(suite, found["baseline"])
    for series in found["series"]:
        fields = ("kind", "size", "contender", "unit", "samples")
        report.series.append(Series(**{name: series[name] for name in fields}))
    return report


def medians(report: BenchReport, kind: str) -> list[list[str]]:
    """Return a row for each contender, a column for each size."""
    found = [series for series in report.series if series.kind == kind]
    if not found:
        raise SystemExit(f"results/{report.suite}.json has no series {kind!r}")
    sizes = sorted({series.size for series in found})
    rows = [["", *(f"{size:,}" for size in sizes)]]
    for name in dict.fromkeys(series.contender for series in found):
        cells = [report.find(kind, size, name) for size in sizes]
        rows.append([name, *(_cell(report, series) for series in cells)])
    return rows


def _cell(report: BenchReport, series: Series | None) -> str:
    if series is None:
        return ""
    text = f"{series.median:,.0f}" if series.median >= 100 else f"{series.median:.3g}"
    ratio = report.ratio(series) if report.baseline else None
    if ratio is None or series.contender == report.baseline:
        return text
    return f"{text} ({ratio:,.0f} x)" if ratio >= 10 else f"{text} ({ratio:.2g} x)"


def ratios(report: BenchReport, kind: str) -> list[list[str]]:
    """Return a row for each series that has a ratio, with its interval."""
    rows = [["", "rounds", "median", "95 %"]]
    for series in sorted(report.series, key=lambda s: s.size):
        found = report.ratios(series)
        if series.kind == kind and found and series.contender != report.baseline:
            low, high = interval(found)
            rows.append(
                [
                    f"{series.contender}, {series.size:,}",
                    str(len(found)),
                    f"{report.ratio(series):.3f} x",
                    f"{low:.3f} to {high:.3f}",
                ]
            )
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first one is its head."""
    head, *rest = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))


def fill(match: re.Match[str]) -> str:
    """Return the markers with their table."""
    suite, mark, kind = match.groups()
    make: Any = medians if mark == ":" else ratios
    table = markdown(make(report_of(suite), kind))
    return f"<!-- {suite}{mark} {kind} -->\n{table}\n<!-- end -->"


def main() -> None:
    """Rewrite the tables of all pages."""
    for page in PAGES:
        page.write_text(TABLE.sub(fill, page.read_text()))


if __name__ == "__main__":
    main()
