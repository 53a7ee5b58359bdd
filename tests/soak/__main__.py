"""Command ``python -m tests.soak``; it exits with 1 if a promise did not hold."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.testing.hosts import unavailable
from tests.soak.overseer import Account, overseer
from tests.soak.plan import Fault


def percentile(values: list[float], part: float) -> float:
    """Return the quantile ``part`` (0 to 1) of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def show(account: Account, console: Console) -> None:
    table = Table(title=f"Soak, seed {account.seed}: {account.seconds / 60:.1f} min")
    for column in ("fault", "times", "detected ms p50", "p99", "max", "whole again s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind, times in sorted(account.faults.items()):
        found = account.detection_ms.get(kind, [])
        detected = ["-"] * 3
        if found:
            points = (statistics.median(found), percentile(found, 0.99), max(found))
            detected = [f"{value:.0f}" for value in points]
        whole = statistics.median(account.recovery_s[kind])
        table.add_row(kind, str(times), *detected, f"{whole:.1f}")
    console.print(table)
    console.print(
        f"{account.hosts} hosts, {account.residents} processes, {account.worlds} "
        f"worlds, {account.incarnations} incarnations, {account.rounds} rounds, "
        f"{account.verdicts} verdicts"
    )
    counts = {
        "false alarms": account.false_alarms,
        "wrong answers": account.wrong_answers,
        "wrong or missing verdicts": account.disagreements,
        "epochs given twice": account.doubles,
        "not whole again": account.stuck,
        "leaks": account.leaks,
    }
    for what, problems in counts.items():
        console.print(f"{what}: {len(problems)}")
    console.print(
        f"largest growth of a process: {account.growth_bytes / 2**20:.1f} MiB"
    )
    for problem in account.problems()[:40]:
        console.print(problem, style="red", markup=False)


async def run(minutes: float, seed: int, console: Console) -> Account:
    told = set[str]()

    def say(account: Account, fault: Fault) -> None:
        done, bad = sum(account.faults.values()), len(account.problems())
        begin = f"{account.seconds:6.0f} s  {done:4d} faults, {bad} problems  "
        console.print(begin + fault.kind, highlight=False)
        for problem in set(account.problems()) - told:
            console.print(problem, style="red", markup=False)
            told.add(problem)

    async with overseer(seed, say) as city:
        try:
            await city.run(minutes * 60)
        except TimeoutError:
            pass  # the account has recorded it
        return city.account


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the account to this file")
    args = parser.parse_args()
    end_as_ctrl_c()
    console = Console(width=110)
    if unavailable() is not None:
        console.print(f"one host only, no cut networks: {unavailable()}")
    account = asyncio.run(run(args.minutes, args.seed, console))
    show(account, console)
    if args.json:
        args.json.write_text(json.dumps(asdict(account), indent=1))
    return 1 if account.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
