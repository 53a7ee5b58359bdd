"""Runs the cluster demo from start to report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from multiworld.demo.cluster.picture import draw
from multiworld.demo.cluster.story import ClusterStory
from multiworld.demo.cluster.tenants import TENANTS, DemoTenant, load_of
from multiworld.demo.pipeline.screen import Screen, event_table
from multiworld.demo.pipeline.texts import is_equal, reference, texts
from multiworld.errors import ServeError
from multiworld.serve.control.answers import DecisionShown, plain
from multiworld.serve.load.generator import Load, embeddings
from multiworld.serve.load.summary import summarise
from multiworld.serve.tenants.records import UsageSum
from multiworld.testing.ray_nodes import RayNodes, ray_nodes

SPEC = Path(__file__).parent / "app.yaml"
NODES = 4
"""Ray nodes, all on this machine."""

FLOOD_PAUSES = 4
"""Length of the flood, in pauses between events."""

CPUS = 4.0
"""CPUs that each node declares to Ray; the nodes share this machine's cores."""


def run(rate: float, pause_s: float, picture: Path, *, as_json: bool) -> int:
    """Run the demo.

    Args:
        rate: Base rate, in requests a second; each tenant sends multiples of it.
        pause_s: Seconds between events.
        picture: File for the timeline.
        as_json: Print the outcome as JSON, and everything else to standard error.

    Returns:
        The exit code: 1 if a request was lost or answered wrongly.

    Raises:
        ServeError: The service did not behave as the demo expects; its logs are kept.
    """
    console = Console(stderr=as_json)
    console.print("computing reference embeddings in a single process …")
    sentences = texts()
    wanted = reference(sentences)
    root = Path(tempfile.mkdtemp(prefix="multiworld-demo-"))
    console.print(f"starting a Ray cluster of {NODES} nodes on this machine …")
    try:
        with ray_nodes(NODES, CPUS) as nodes:
            demo = _Demo(console, sentences, wanted, root, nodes)
            outcome = asyncio.run(demo.run(rate, pause_s, picture))
    except ServeError:
        console.print(f"the logs of the service are in {root}", soft_wrap=True)
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
        """Run the service and the story; return the outcome, ready for JSON.

        Cancellation:
            Stops the load and the service, and returns nothing.
        """
        self._screen.tell("starting the service: two models, three tenants …")
        try:
            url = await self._story.start()
            self._screen.tell(f"[green]ready[/] at {url}")
            loads = {g.name: await self._load(url, g, rate) for g in TENANTS}
            await self._run_under_load(loads, pause_s)
            decided = await self._story.decisions()
            usage = await self._story.usage()
        finally:
            await self._story.end()
        return self._outcome(loads, decided, usage, picture)

    async def _load(self, url: str, tenant: DemoTenant, rate: float) -> Load:
        def check(number: int, answer: Any) -> bool:
            row = answer["data"][0]["embedding"]
            return is_equal(row, self._wanted[number % len(self._wanted)])

        key = await self._story.create_tenant(tenant)
        target = embeddings(url, tenant.model, self._sentences)
        return load_of(tenant, target, key, rate, check)

    async def _run_under_load(self, loads: dict[str, Load], pause_s: float) -> None:
        steady = [loads[g.name] for g in TENANTS if not g.is_flood]
        floods = [loads[g.name] for g in TENANTS if g.is_flood]
        running = [asyncio.ensure_future(load.run()) for load in steady]
        around = [
            asyncio.ensure_future(self._story.watch(steady[0])),
            asyncio.ensure_future(self._screen.show(self._story, loads)),
        ]
        try:
            await self._play(pause_s, floods)
        finally:
            for load in loads.values():
                load.end()
            await asyncio.gather(*running)
            for task in around:
                task.cancel()
            await asyncio.gather(*around, return_exceptions=True)
            self._screen.finish()

    async def _play(self, pause_s: float, floods: list[Load]) -> None:
        story = self._story
        await asyncio.sleep(pause_s)
        await story.wait_until_scaled("encoder", up=True)
        name = await story.lose_node()
        await asyncio.sleep(pause_s)
        await story.add_node(name)
        await self._flood(pause_s, floods)
        await asyncio.sleep(pause_s)
        await story.add_model()
        await asyncio.sleep(pause_s)
        await story.remove_model()
        await story.wait_until_scaled("encoder", up=False)
        await asyncio.sleep(pause_s)

    async def _flood(self, pause_s: float, floods: list[Load]) -> None:
        """Let a tenant send much more than the service can answer."""
        scene = self._story.begin("a tenant floods")
        self._screen.tell("[yellow]lab[/] sends much more than its share")
        running = []
        for load in floods:
            load.offset_s = scene.begin_s
            running.append(asyncio.ensure_future(load.run()))
        await asyncio.sleep(FLOOD_PAUSES * pause_s)
        for load in floods:
            load.end()
        await asyncio.gather(*running)
        self._story.finish(scene)

    def _outcome(
        self,
        loads: dict[str, Load],
        decided: Sequence[DecisionShown],
        usage: Sequence[UsageSum],
        picture: Path,
    ) -> dict[str, Any]:
        console, story = self._console, self._story
        samples = {
            name: sorted(load.samples, key=lambda s: s.due_s)
            for name, load in loads.items()
        }
        steady = [s for g in TENANTS if not g.is_flood for s in samples[g.name]]
        console.print(event_table(story.scenes, steady))
        console.print(_moves(story))
        console.print(tenant_table(loads, usage))
        console.print("scaling decisions and their reasons (multiworld explain):")
        for decision in decided:
            if decision.kind != "scaling":
                continue
            first = story.scenes[0]
            at_s = decision.at - first.wall_s + first.begin_s
            text = f"  {at_s:6.1f} s  {decision.about}: {decision.what}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        draw(picture, samples, story.scenes, story.replica_counts, story.labels)
        console.print(f"timeline drawn to {os.fspath(picture)}", soft_wrap=True)
        found = {name: summarise(samples[name]) for name in loads}
        is_good = all(
            load.sent == len(load.samples)
            and not found[name].wrong
            and set(found[name].statuses) <= _allowed(name)
            for name, load in loads.items()
        )
        if is_good:
            console.print("[green]no request was lost or answered wrongly[/]")
        return {
            "is_good": is_good,
            "tenants": {n: dataclasses.asdict(summary) for n, summary in found.items()},
            "scenes": [dataclasses.asdict(scene) for scene in story.scenes],
            "moves": [dataclasses.asdict(move) for move in story.moves],
            "decisions": plain(decided),
            "usage": plain(usage),
            "picture": str(picture),
        }


def _allowed(name: str) -> set[int]:
    """Return the statuses that are no loss; 429 is one for the tenant that floods."""
    is_flood = next(g.is_flood for g in TENANTS if g.name == name)
    return {200, 429} if is_flood else {200}


def tenant_table(loads: dict[str, Load], usage: Sequence[UsageSum]) -> Table:
    """Return the table of requests sent, answered and billed for each tenant."""
    table = Table(title="tenants", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tenant", "model"):
        table.add_column(title)
    columns = ("sent", "answered", "refused", "lost", "wrong", "p50 ms", "p99 ms")
    for title in (*columns, "billed"):
        table.add_column(title, justify="right")
    billed: Counter[str] = Counter()
    for row in usage:
        billed[row.tenant] += row.answered
    for tenant in TENANTS:
        load = loads[tenant.name]
        found = summarise(load.samples)
        refused = found.statuses.get(429, 0)
        numbers = (load.sent, found.answered, refused, found.failed - refused)
        table.add_row(
            tenant.name,
            tenant.model,
            *map(str, numbers),
            str(found.wrong),
            f"{found.p50_s * 1000:.0f}",
            f"{found.p99_s * 1000:.0f}",
            str(billed[tenant.name]),
        )
    return table


def _moves(story: ClusterStory) -> Table:
    table = Table(title="replicas lost with the node, and their replacements")
    for title in ("lost", "node", "replacement", "node", "reason"):
        table.add_column(title)
    for move in story.moves:
        table.add_row(move.lost, move.was_on, move.new, move.is_on, move.why)
    return table
