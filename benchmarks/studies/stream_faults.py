"""Cost of a kill for the streams of any stack with OpenAI's completions API.

``python -m benchmarks.studies.stream_faults --url http://localhost:8000 --model NAME
--kill 'COMMAND'``. Five kinds of streams run at the same time (see ``kill_rounds``),
first without a kill. Then, at a random time of each round, the command runs, which
should kill a computing process (for example ``multiworld chaos kill NAME 1``), and the
round ends when the routes ``--health`` of all URLs have answered for ``--settle``
seconds. Prints the number of streams that were cut, of tokens that are wrong or
missing, and of tokens that differ without a kill, and the longest pause. Servers must
accept and return token ids as vLLM does; with ``--text``, characters are compared
instead. Exits with 1 if a stream was cut, or a token is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.members import Step
from benchmarks.presentation import to_json
from benchmarks.samples import BenchReport
from benchmarks.serving.kill_rounds import (
    CONTROL,
    CUT,
    KINDS,
    PAUSE,
    TOKEN,
    WRONG,
    Front,
    measure,
)

BACK_S = 600.0
"""Maximum seconds until all servers answer again."""


def front_of(given: argparse.Namespace) -> Front:
    """Return the front that the arguments describe."""

    async def kill() -> None:
        process = await asyncio.create_subprocess_shell(given.kill)
        if await process.wait():
            raise RuntimeError(f"{given.kill!r} failed")

    async def heal() -> None:
        end, good_since = time.monotonic() + BACK_S, time.monotonic()
        while time.monotonic() - good_since < given.settle:
            await asyncio.sleep(0.5)
            if not await _all_answer(given):
                good_since = time.monotonic()
            if time.monotonic() > end:
                raise RuntimeError(f"a server is not back after {BACK_S:.0f} s")

    kinds = tuple(kind for kind in KINDS if kind not in given.without)
    urls = [url.rstrip("/") for url in given.url]
    return Front(
        given.name, urls, given.model, kill, heal, is_text=given.text, kinds=kinds
    )


async def _all_answer(given: argparse.Namespace) -> bool:
    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for url in given.url:
                async with http.get(url.rstrip("/") + given.health) as answer:
                    if answer.status != 200:
                        return False
    except (aiohttp.ClientError, TimeoutError):
        return False
    return True


def table_of(report: BenchReport, kinds: tuple[str, ...]) -> tuple[Table, bool]:
    """Return a table of results, and whether all streams were complete and correct."""
    table = Table("stream", "cut", "wrong or missing", "different without a kill")
    is_good = True
    for kind in kinds:
        sums = [
            sum(sum(s.samples) for s in report.series if s.kind == f"{what}: {kind}")
            for what in (CUT, WRONG, CONTROL)
        ]
        is_good = is_good and not sums[0] and not sums[1]
        table.add_row(kind, *(f"{value:.0f}" for value in sums))
    return table, is_good


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kill", required=True, help="shell command")
    parser.add_argument("--name", default="this stack")
    parser.add_argument("--health", default="/health")
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--without", action="append", default=[], choices=[*KINDS])
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    report = BenchReport("stream_faults", "")
    console = Console()

    def on_step(step: Step) -> None:
        kind, what = step
        if kind == "sample":
            report.add(*what)
        elif kind == "step":
            console.print(what[1])

    front = front_of(given)
    draw = random.Random(given.seed)
    asyncio.run(measure([front], given.rounds, draw, on_step))
    table, is_good = table_of(report, front.kinds)
    console.print(table)
    for what, unit in ((PAUSE, "ms at worst"), (TOKEN, "ms")):
        worst = max(max(s.samples) for s in report.series if s.kind == what)
        console.print(f"{what}: {worst:,.0f} {unit}")
    if given.out is not None:
        given.out.write_text(json.dumps(to_json(report), indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
