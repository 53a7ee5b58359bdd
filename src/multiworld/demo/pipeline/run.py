"""Runs the pipeline demo from start to report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from multiworld.demo.pipeline.live import under_load
from multiworld.demo.pipeline.picture import draw
from multiworld.demo.pipeline.screen import Screen, event_table
from multiworld.demo.pipeline.story import MODEL, Story
from multiworld.demo.pipeline.texts import is_equal, reference, texts
from multiworld.errors import ServeError
from multiworld.serve.load.generator import Load, embeddings
from multiworld.serve.load.summary import summarise

SPEC = Path(__file__).parent / "app.yaml"


def run(rate: float, pause_s: float, picture: Path, *, as_json: bool) -> int:
    """Run the demo.

    Args:
        rate: Requests a second.
        pause_s: Seconds between events.
        picture: File for the timeline.
        as_json: Print the outcome as JSON, and everything else to standard error.

    Returns:
        The exit code: 1 if a request was lost or answered wrongly.

    Raises:
        ServeError: The service did not do what the demo shows. Its logs are kept.
    """
    console = Console(stderr=as_json)
    console.print("computing reference embeddings in a single process …")
    sentences = texts()
    wanted = reference(sentences)
    root = Path(tempfile.mkdtemp(prefix="multiworld-demo-"))
    try:
        outcome = asyncio.run(
            _run(console, sentences, wanted, root, rate, pause_s, picture)
        )
    except ServeError:
        console.print(f"the logs of the service are in {root}", soft_wrap=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    return 0 if outcome["is_good"] else 1


async def _run(
    console: Console,
    sentences: list[str],
    wanted: list[list[float]],
    root: Path,
    rate: float,
    pause_s: float,
    picture: Path,
) -> dict[str, Any]:
    screen = Screen(console)
    story = Story(SPEC, root, screen.tell)

    def check(number: int, answer: Any) -> bool:
        row = answer["data"][0]["embedding"]
        return is_equal(row, wanted[number % len(wanted)])

    try:
        screen.tell("starting the service: three stages, two replicas of the middle …")
        url = await story.start()
        screen.tell(f"[green]ready[/] at {url}; sending {rate:g} texts a second")
        load = Load(embeddings(url, MODEL, sentences), rate, check)
        beside = story.watch(load), screen.show(story, {MODEL: load})
        try:
            async with under_load(load, *beside):
                await story.break_every_stage(pause_s)
                await story.update("2")
                await asyncio.sleep(pause_s)
        finally:
            screen.finish()
    finally:
        await story.end()
    return _outcome(console, story, load, picture)


def _outcome(
    console: Console, story: Story, load: Load, picture: Path
) -> dict[str, Any]:
    samples = sorted(load.samples, key=lambda s: s.due_s)
    found = summarise(samples)
    console.print(event_table(story.scenes, samples))
    console.print(
        f"requests: {load.sent} sent, {found.answered} answered, "
        f"{load.sent - found.answered} failed, {found.wrong} wrong · p50 "
        f"{found.p50_s * 1000:.1f} ms · p99 {found.p99_s * 1000:.1f} ms · slowest "
        f"{found.max_s * 1000:.0f} ms"
    )
    for error, count in found.errors.items():
        console.print(f"[red]{count} times:[/] {error}")
    draw(
        picture,
        "MiniLM in three stages over HTTP, broken on purpose",
        {MODEL: samples},
        story.scenes,
        story.replica_counts,
        story.stages,
    )
    console.print(f"timeline drawn to {os.fspath(picture)}", soft_wrap=True)
    is_good = load.sent == found.answered and not found.wrong
    if is_good:
        console.print("[green]no request was lost or answered wrongly[/]")
    return {
        "is_good": is_good,
        "sent": load.sent,
        **dataclasses.asdict(found),
        "scenes": [dataclasses.asdict(scene) for scene in story.scenes],
        "picture": str(picture),
    }
