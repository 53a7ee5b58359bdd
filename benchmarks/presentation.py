"""Tables, JSON and pictures of the results."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.samples import BenchReport, Series, interval
from multiworld import __version__


def tables(report: BenchReport) -> Iterable[Table]:
    """Yield a table for each kind of measurement."""
    for kind in dict.fromkeys(series.kind for series in report.series):
        found = [series for series in report.series if series.kind == kind]
        unit = found[0].unit
        table = Table(title=f"{report.suite}: {kind}", caption=_caption(report, found))
        for column in ("size", "", f"median {unit}".strip(), "worst round"):
            table.add_column(
                column, justify="right" if column else "left", no_wrap=not column
            )
        if report.baseline:
            table.add_column(f"to {report.baseline}", justify="right")
            table.add_column("95 %", justify="right", no_wrap=True)
        for series in sorted(found, key=lambda s: s.size):
            table.add_row(*_row(report, series))
        yield table


def _caption(report: BenchReport, found: list[Series]) -> str:
    rounds = len(found[0].samples)
    what = "higher is better" if found[0].is_rate else "lower is better"
    return f"{rounds} round(s), {what}"


def _row(report: BenchReport, series: Series) -> list[str]:
    row = [
        f"{series.size:,}",
        series.contender,
        _number(series.median),
        _number(series.worst),
    ]
    if report.baseline:
        ratio = report.ratio(series)
        row.append("" if ratio is None else f"{ratio:.3g} x")
        row.append(_interval(report, series))
    return row


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _interval(report: BenchReport, series: Series) -> str:
    ratios = report.ratios(series)
    if len(ratios) < 3 or series.contender == report.baseline:
        return ""
    low, high = interval(ratios)
    return f"{low:.3g} to {high:.3g}"


def to_json(report: BenchReport) -> dict[str, Any]:
    """Return the results with date, machine and versions, ready for JSON."""
    return {
        "suite": report.suite,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": {
            "multiworld": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
        },
        "baseline": report.baseline,
        "notes": report.notes,
        "series": [
            {
                **asdict(series),
                "median": series.median,
                "worst": series.worst,
                "ratio": report.ratio(series) if report.baseline else None,
            }
            for series in report.series
        ],
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Draw each kind of measurement that has several sizes; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    made = []
    for kind in dict.fromkeys(series.kind for series in report.series):
        found = [series for series in report.series if series.kind == kind]
        names = dict.fromkeys(series.contender for series in found)
        if len({series.size for series in found}) < 2:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.2))
        for name in names:
            own = sorted(
                (s for s in found if s.contender == name), key=lambda s: s.size
            )
            axes.plot(
                [s.size for s in own], [s.median for s in own], marker="o", label=name
            )
        axes.set(xscale="log", yscale="log", xlabel="size", ylabel=found[0].unit)
        axes.set_title(f"{report.suite}: {kind}")
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        stem = (
            f"{report.suite}-{kind}".replace(",", "").replace(":", "").replace(" ", "-")
        )
        for ending in ("png", "svg"):
            path = folder / f"{stem}.{ending}"
            figure.savefig(path, dpi=120)
            made.append(path)
        plt.close(figure)
    return made
