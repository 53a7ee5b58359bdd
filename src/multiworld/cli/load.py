"""``multiworld load``: sends requests at a steady rate and prints a summary."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sys
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from multiworld.cli.options import JSON, FiniteRange, finite, new_table, print_table
from multiworld.serve.load.breakdown import PhaseSummary, cpu_between, cpu_in, phases_in
from multiworld.serve.load.generator import (
    TIMEOUT,
    Load,
    Target,
    chats,
    embeddings,
    inference,
)
from multiworld.serve.load.summary import Sample, Summary, summarise

LOOK_S = 0.2


def target_of(
    url: str,
    model: str,
    texts: Path | None,
    body: Path | None,
    text: str,
    max_tokens: int | None = None,  # None: request embeddings, not chats
) -> Target:
    """Return the requests to send: ``body``, or a chat or embedding for each text."""
    if body is not None:
        return inference(url, model, [body.read_bytes()])
    lines = [text]
    if texts is not None:
        try:
            text = texts.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"cannot read {texts}: {error}") from error
        lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise click.ClickException(f"{texts} has no line with text")
    if max_tokens is not None:
        return chats(url, model, lines, max_tokens)
    return embeddings(url, model, lines)


async def _ask(target: Target, url: str, body: bytes | None = None) -> tuple[int, str]:
    """Send one request; return the status and the text of the answer."""
    method = "GET" if body is None else "POST"
    headers, tls = target.headers, target.tls
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as http,
        http.request(method, url, data=body, headers=headers, ssl=tls) as response,
    ):
        return response.status, await response.text()


async def _generates(target: Target, url: str, model: str) -> bool:
    """Return whether a model generates text; False if that is unknown."""
    try:
        _, text = await _ask(target, f"{url.rstrip('/')}/v1/models/{model}")
        return "max_model_len" in json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError):
        return False


def _secured(target: Target, ca: Path | None, key: str | None) -> Target:
    """Return a target that trusts the certificates in a file, and sends a key."""
    if key is not None:
        headers = {**target.headers, "Authorization": f"Bearer {key}"}
        target = replace(target, headers=headers)
    if ca is None:
        return target
    try:
        return replace(target, tls=ssl.create_default_context(cafile=str(ca)))
    except (OSError, ssl.SSLError) as error:
        raise click.ClickException(
            f"--ca {ca}: {error}; give a PEM file with certificates"
        ) from error


def _print_breakdown(phases: list[PhaseSummary], cpu: dict[str, float] | None) -> None:
    if not phases:
        click.echo("the service does not report a breakdown of the time")
        return
    table = new_table("time of a request, by phase", "phase")
    for column in ("mean", "p50", "p99", "share"):
        table.add_column(column, justify="right")
    whole = sum(phase.mean_s for phase in phases)
    for phase in phases:
        times = (phase.mean_s, phase.p50_s, phase.p99_s)
        shown = [f"{1000 * seconds:.2f} ms" for seconds in times]
        table.add_row(phase.phase, *shown, f"{phase.mean_s / whole:.0%}")
    print_table(table)
    if cpu is None:
        click.echo("CPU time is in the metrics, which need the key of an operator")
        return
    table = new_table("CPU time of one request", "process")
    table.add_column("", justify="right")
    for name, seconds in [*cpu.items(), ("together", sum(cpu.values()))]:
        table.add_row(escape(name), f"{1000 * seconds:.2f} ms")
    print_table(table)


async def _cpu(target: Target, metrics: str | None) -> dict[str, float] | None:
    """Return the CPU seconds of each process; None if the metrics are unavailable."""
    if metrics is None:
        return None
    try:
        status, text = await _ask(target, metrics)
        return cpu_in(text) if status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def _try(target: Target) -> None:
    """Send one request, so that an invalid one fails at once with a single message."""
    try:
        status, text = await _ask(target, target.url, target.bodies[0])
    except aiohttp.InvalidURL as error:
        raise click.ClickException(
            f"{target.url} is not a URL; a URL begins with http:// or https://"
        ) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise click.ClickException(
            f"{target.url} cannot be reached ({type(error).__name__}: {error}); give "
            "the URL that `multiworld serve` or `status` shows"
        ) from error
    if status in (401, 403, 404, 405):
        raise click.ClickException(f"{target.url}: {_message_in(text)}")
    if status in (400, 415, 422):
        raise click.ClickException(
            f"{target.url} refuses the request: {_message_in(text)}; give a valid "
            "request with --body or --texts"
        )


def _message_in(text: str) -> str:
    """Return the message in an error's body, or else its first characters."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:400]
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def _run(
    target: Target, rate: float, seconds: float, *, is_quiet: bool, metrics: str | None
) -> tuple[list[Sample], dict[str, float] | None]:
    """Send requests; return samples, and the CPU seconds of one request by process."""
    await _try(target)
    before = await _cpu(target, metrics)
    load = Load(target, rate)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=is_quiet) as progress:
        bar = progress.add_task("sending", total=rate * seconds)
        running = asyncio.ensure_future(load.run(seconds))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=LOOK_S)
                progress.update(bar, completed=load.sent, description=_progress(load))
            await running
        except asyncio.CancelledError:  # Ctrl-C: summarise the answers so far
            running.cancel()
            await asyncio.wait({running})
    after = await _cpu(target, metrics)
    if before is None or after is None:
        return load.samples, None
    return load.samples, cpu_between(before, after, len(load.samples))


def _progress(load: Load) -> str:
    # Not counted here: that would take as long as the run has samples.
    failed = len(load.samples) - load.answered
    return f"{load.sent} sent, {load.answered} answered, {failed} failed"


def _table(found: Summary, rate: float) -> Table:
    title = f"{found.sent} requests at {rate:g} per second"
    table = new_table(title, "")
    table.show_header = False
    table.add_column()
    table.add_row("answered", str(found.answered))
    table.add_row("failed", f"[red]{found.failed}[/]" if found.failed else "0")
    if found.cut:
        table.add_row("cut answers", f"[red]{found.cut}[/]")
    for title, p50_s, p99_s in (
        ("first token", found.first_p50_s, found.first_p99_s),
        ("between tokens", found.gap_p50_s, found.gap_p99_s),
    ):
        if p50_s is not None and p99_s is not None:
            table.add_row(f"{title}, p50", f"{p50_s * 1000:.1f} ms")
            table.add_row(f"{title}, p99", f"{p99_s * 1000:.1f} ms")
    if found.gap_max_s is not None:
        table.add_row("longest pause", f"{found.gap_max_s * 1000:.1f} ms")
        table.add_row("whole answers:", "")
    if found.answered:
        table.add_row("p50", f"{found.p50_s * 1000:.1f} ms")
        table.add_row("p99", f"{found.p99_s * 1000:.1f} ms")
        table.add_row("slowest", f"{found.max_s * 1000:.1f} ms")
    for status, count in found.statuses.items():
        table.add_row(f"status {status}" if status else "no answer", str(count))
    for error, count in found.errors.items():
        table.add_row(f"{count} times", escape(error))
    return table


@click.command()
@click.argument("url")
@click.argument("model")
@click.option(
    "--rate",
    type=FiniteRange(0.01, 1e5),
    default=10,
    help="Requests per second.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.1),
    default=10,
    help="Duration of the run.",
)
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of texts to embed or to start chats with: one per line, used in turn.",
)
@click.option(
    "--body",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a JSON body of the Open Inference Protocol, sent instead of texts.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 100_000),
    default=64,
    help="Maximum number of tokens of an answer, if the model generates text.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file with the certificates to trust, for an https:// URL.",
)
@click.option(
    "--key",
    envvar="MULTIWORLD_KEY",
    help="API key of a tenant; safer in MULTIWORLD_KEY, which other users cannot see.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Show what the time and the CPU time of a request were spent on.",
)
@JSON
def load(
    url: str,
    model: str,
    rate: float,
    seconds: float,
    texts: Path | None,
    body: Path | None,
    max_tokens: int,
    ca: Path | None,
    key: str | None,
    breakdown: bool,
    as_json: bool,
) -> None:
    """Send requests to MODEL at URL at a steady rate, and print a summary.

    A model that generates text receives streamed chats with greedy decoding; the
    summary then shows the times to the first token and between tokens, and the streams
    that were cut.

    Open loop: each request is sent when it is due, regardless of earlier ones, and its
    latency counts from then. Ctrl-C ends the run and prints a summary of the answers so
    far. The exit status is 1 if a request failed.
    """
    # The user may have given the base URL of an API client, which ends in /v1 or /v2.
    url = re.sub(r"/v[12]/?$", "", url)
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"{url} is not an address; give http://HOST:PORT")
    target = target_of(url, model, texts, body, "The quick brown fox.")
    target = _secured(target, ca, key)
    if body is None and asyncio.run(_generates(target, url, model)):
        prompt = "Tell me about the quick brown fox."
        target = target_of(url, model, texts, None, prompt, max_tokens)
        target = _secured(target, ca, key)
    metrics = f"{url.rstrip('/')}/metrics" if breakdown else None
    if metrics is not None:
        target = replace(target, headers={**target.headers, "X-Timing": "1"})
    samples, cpu = asyncio.run(
        _run(target, rate, seconds, is_quiet=as_json, metrics=metrics)
    )
    found, phases = summarise(samples), phases_in(samples)
    if as_json:
        more = {"phases": [asdict(p) for p in phases], "cpu_s": cpu} if metrics else {}
        click.echo(json.dumps(finite({**asdict(found), **more}), indent=2))
    else:
        print_table(_table(found, rate))
        if metrics is not None:
            _print_breakdown(phases, cpu)
    sys.exit(1 if found.failed else 0)
