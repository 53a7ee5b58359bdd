"""Puts the demo of a cluster together."""

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
from rich.table import Table

from multiworld.demo.cluster.story import ClusterStory
from multiworld.demo.pipeline.picture import draw
from multiworld.demo.pipeline.screen import Screen, event_table
from multiworld.demo.pipeline.texts import is_equal, reference, texts
from multiworld.errors import ServeError
from multiworld.serve.load.generator import Load, embeddings
from multiworld.serve.load.summary import summarise
from multiworld.testing.ray_nodes import RayNodes, ray_nodes

SPEC = Path(__file__).parent / "app.yaml"
MODELS = ("encoder", "search")
NODES = 4
CPUS = 4.0
"""Of each node, as Ray is told: this machine's cores are shared by all of them."""


def run(rate: float, pause_s: float, picture: Path, *, as_json: bool) -> int:
    """Run the demo; return 1 if a request was lost or wrong."""
    console = Console(stderr=as_json)
    console.print("embedding the texts in a single process, to compare with …")
    sentences = texts()
    wanted = reference(sentences)
    root = Path(tempfile.mkdtemp(prefix="multiworld-demo-"))
    console.print(f"starting a Ray cluster of {NODES} nodes on this machine …")
    try:
        with ray_nodes(NODES, CPUS) as nodes:
            demo = _Demo(console, sentences, wanted, root, nodes)
            outcome = asyncio.run(demo.run(rate, pause_s, picture))
    except ServeError:
        console.print(f"its logs are in {root}", soft_wrap=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    return 0 if outcome["is_good"] else 1


class _Demo:
    def __init__(
        self,
        console: Console,
        sentences: list[str],
        wanted: list[list[float]],
        root: Path,
        nodes: RayNodes,
    ) -> None:
        self._console, self._sentences, self._wanted = console, sentences, wanted
        self._screen = Screen(console)
        self._story = ClusterStory(SPEC, root, self._screen.tell, nodes)

    async def run(self, rate: float, pause_s: float, picture: Path) -> dict[str, Any]:
        """Play it; return what came of it."""
        self._screen.tell("starting the service: two models, ten replicas …")
        try:
            url = await self._story.start()
            self._screen.tell(f"[green]ready[/] at {url}; {rate:g} texts a second each")
            loads = {m: self._load(url, m, rate) for m in MODELS}
            await self._under(loads, pause_s)
        finally:
            await self._story.end()
        return self._outcome(loads, picture)

    def _load(self, url: str, model: str, rate: float) -> Load:
        def check(number: int, answer: Any) -> bool:
            row = answer["data"][0]["embedding"]
            return is_equal(row, self._wanted[number % len(self._wanted)])

        return Load(embeddings(url, model, self._sentences), rate, check)

    async def _under(self, loads: dict[str, Load], pause_s: float) -> None:
        running = [asyncio.ensure_future(load.run()) for load in loads.values()]
        around = [
            asyncio.ensure_future(self._story.watch(next(iter(loads.values())))),
            asyncio.ensure_future(self._screen.show(self._story, loads)),
        ]
        try:
            await self._play(pause_s)
        finally:
            for load in loads.values():
                load.end()
            await asyncio.gather(*running)
            for task in around:
                task.cancel()
            await asyncio.gather(*around, return_exceptions=True)
            self._screen.finish()

    async def _play(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        name = await self._story.lose_node()
        await asyncio.sleep(pause_s)
        await self._story.add_node(name)
        await asyncio.sleep(pause_s)
        await self._story.add_model()
        await asyncio.sleep(pause_s)
        await self._story.remove_model()
        await asyncio.sleep(pause_s)

    def _outcome(self, loads: dict[str, Load], picture: Path) -> dict[str, Any]:
        console, story = self._console, self._story
        samples = {
            model: sorted(load.samples, key=lambda s: s.due_s)
            for model, load in loads.items()
        }
        every = [sample for found in samples.values() for sample in found]
        console.print(event_table(story.scenes, every))
        console.print(_moves(story))
        is_good, found = True, {}
        for model, load in loads.items():
            found[model] = summary = summarise(samples[model])
            is_good &= load.sent == summary.answered and not summary.wrong
            console.print(
                f"{model}: {load.sent} sent, {summary.answered} answered, "
                f"{load.sent - summary.answered} failed, {summary.wrong} wrong · p50 "
                f"{summary.p50_s * 1000:.1f} ms · p99 {summary.p99_s * 1000:.1f} ms"
            )
            for error, count in summary.errors.items():
                console.print(f"[red]{count} times[/] {error}")
        title = "Two models on four nodes: latency, and the replicas of each node"
        draw(picture, title, samples, story.scenes, story.strengths, story.lanes)
        console.print(f"the timeline: {os.fspath(picture)}", soft_wrap=True)
        if is_good:
            console.print(
                "[green]no request was lost, and none was answered wrongly[/]"
            )
        return {
            "is_good": is_good,
            "models": {m: dataclasses.asdict(summary) for m, summary in found.items()},
            "scenes": [dataclasses.asdict(scene) for scene in story.scenes],
            "moves": [dataclasses.asdict(move) for move in story.moves],
            "picture": str(picture),
        }


def _moves(story: ClusterStory) -> Table:
    table = Table(title="what was moved where, and why")
    for title in ("lost", "was on", "now", "on", "why"):
        table.add_column(title)
    for move in story.moves:
        table.add_row(move.lost, move.was_on, move.new, move.is_on, move.why)
    return table
