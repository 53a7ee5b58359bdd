"""Three tenants and two models on a Ray cluster of four nodes, one of which is killed.

    make demo-cluster                      # in a checkout, or:
    pip install 'multiworld-elastic[demo,ray]'
    python examples/cluster/cluster.py

All nodes run on this machine. Bursts of load scale a model. A node is killed with every
replica on it, and added again. One tenant floods the service. A third model is added
and removed. Exits with 1 if a request was lost or answered wrongly.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from picture import draw
from ray_nodes import RayNodes, ray_nodes
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.demo import minilm
from multiworld.demo.chats.background_load import under_load
from multiworld.demo.chats.story import Story
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import TenantWithKey, Updated
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.load.generator import Load, embeddings
from multiworld.serve.load.summary import summarise
from multiworld.serve.simulation.traces import generated

NODES = 4
CPUS = 4.0
"""CPUs that each node declares to Ray; the nodes share the cores of this machine."""

TEXTS = [
    f"{subject} {verb}."
    for subject in ("A worker", "The last replica", "Our store", "The gateway")
    for verb in ("joins", "was lost, and nobody noticed", 12 * "waits, and then ")
]
"""Texts of very different lengths, so that batches are padded."""


@dataclass(frozen=True)
class Tenant:
    """A tenant, the phases of its load, and its settings.

    A phase is a multiple of the base rate, a number of seconds, and the coefficient of
    variation of the times between requests (1 is Poisson).
    """

    name: str
    model: str
    phases: tuple[tuple[float, float, float], ...]
    settings: dict[str, Any]

    def load(self, url: str, key: str, rate: float, check: Any) -> Load:
        """Return the tenant's load on the service at ``url``."""
        phases = [
            f"gamma:rate={factor * rate},seconds={seconds},cv={cv}"
            for factor, seconds, cv in self.phases
        ]
        # repeated so often that they outlast the example
        due = [arrival.at for arrival in generated("+".join(30 * phases))]
        target = embeddings(url, self.model, TEXTS)
        headers = {**target.headers, "Authorization": f"Bearer {key}"}
        return Load(dataclasses.replace(target, headers=headers), rate, check, due=due)


BURSTS = ((0.5, 15, 1.5), (3.0, 25, 1.5), (0.5, 20, 1.5))
SHOP = Tenant("shop", "encoder", BURSTS, {"weight": 2.0})
BANK = Tenant("bank", "search", ((0.5, 30, 1.0),), {"models": ["search"]})
LAB = Tenant(
    "lab", "encoder", ((12.0, 30, 1.0),), {"weight": 0.5, "max_parallel_requests": 24}
)
"""The tenant that floods the service; it may be refused with 429."""


class ClusterStory(Story):
    """Service on Ray nodes that are killed and added."""

    def __init__(self, root: Path, tell: Any, nodes: RayNodes) -> None:
        self._app = yaml.safe_load(Path(__file__).with_name("app.yaml").read_text())
        self._app["ray"] = {"address": nodes.address}
        spec = root / "app.yaml"
        spec.write_text(yaml.safe_dump(self._app))
        super().__init__(spec, root, tell, "encoder")
        self._nodes = nodes
        self._least = sum(
            stage.get("replicas") or stage["autoscaling_config"]["min_replicas"]
            for stage in self._app["models"]["encoder"]["stages"]
        )
        self.moves: list[dict[str, str]] = []

    def is_whole(self) -> bool:
        """Tell whether the ready replicas are exactly the desired ones."""
        ready = Counter(
            (p.model, p.stage)
            for p in self.status.processes
            if p.model and p.phase == "ready"
        )
        return ready == {
            (name, stage): count
            for name, model in self.status.wanted.models.items()
            for stage, count in enumerate(model.replicas)
        }

    async def lose_node(self) -> str:
        """Kill the node with the most replicas; return its name after the recovery."""
        node_of = {p.name: p.node for p in self.status.processes if p.model}
        counts = Counter(node for node in node_of.values() if node != "head")
        node, count = counts.most_common(1)[0]
        scene = self.begin(f"{node} is lost")
        since = await self.last_event()
        self.tell(f"[red]killing[/] {node}, which runs {count} replicas")
        await asyncio.to_thread(self._nodes.remove, node)
        gone = [name for name in node_of if node_of[name] == node]
        lost = [await self.event(since, "lost", name) for name in gone]
        scene.detect_s = max(event.at for event in lost) - scene.wall_s
        await self.wait_until(self.is_whole)
        self.finish(scene)
        params = {"since": since}
        events = await self.ask("GET", "/events", list[HistoryEntry], params=params)
        placed = [event for event in events if event.kind == "placed"]
        for name in gone:
            stage = name.rpartition("/")[0]
            for new in [e for e in placed if e.name.rpartition("/")[0] == stage][:1]:
                placed.remove(new)
                self.moves.append({"lost": name, "new": new.name, "why": new.text})
                self.tell(f"{name} on {node} → {new.text}")
        return node

    async def add_node(self, name: str) -> None:
        """Add a node, and wait until the service has noticed it."""
        scene = self.begin(f"{name} is back")
        since = await self.last_event()
        # Ray can start a node in the main thread only, which blocks the event loop.
        # The load catches up, and its latencies count from when each request was due.
        self._nodes.add(name)
        await self.event(since, "node added")
        self.tell(f"[green]added[/] {name}; the load paused while Ray started it")
        self.finish(scene)

    async def update(self, title: str, models: dict[str, Any]) -> None:
        """Change the models of the service, and wait until that is done."""
        scene = self.begin(title)
        asked = {"text": yaml.safe_dump({**self._app, "models": models}), "where": ""}
        await self.ask("POST", "/update", Updated, json=asked)
        self.tell(f"[cyan]update[/]: {title}")
        await self.wait_until(self.is_whole)
        self.finish(scene)

    async def wait_until_scaled(self, *, up: bool) -> None:
        """Wait until the load has scaled the encoder up, or down to its minimum."""
        self.tell(f"waiting until the encoder is scaled {'up' if up else 'down'} …")

        def is_scaled() -> bool:
            replicas = sum(self.status.wanted.models["encoder"].replicas)
            return (replicas > self._least) is up and self.is_whole()

        await self.wait_until(is_scaled)
        replicas = self.status.wanted.models["encoder"].replicas
        self.tell(f"[cyan]encoder[/] has {list(replicas)} replicas")

    async def play(self, pause_s: float, flood: Load) -> None:
        """Let everything happen, one event after the other."""
        await asyncio.sleep(pause_s)
        await self.wait_until_scaled(up=True)
        node = await self.lose_node()
        await asyncio.sleep(pause_s)
        await self.add_node(node)
        scene = self.begin("a tenant floods")
        flood.offset_s = scene.begin_s
        self.tell("[yellow]lab[/] sends much more than its share")
        async with under_load(flood):
            await asyncio.sleep(4 * pause_s)
        self.finish(scene)
        await asyncio.sleep(pause_s)
        models = self._app["models"]
        more = {**models, "third": models["search"]}
        await self.update("a third model is added", more)
        await asyncio.sleep(pause_s)
        await self.update("and removed", models)
        await self.wait_until_scaled(up=False)
        await asyncio.sleep(pause_s)


def reference() -> list[list[float]]:
    """Return the embedding of each text, computed by sentence-transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm.folder()), device="cpu")
    rows = model.encode(TEXTS, batch_size=1, show_progress_bar=False)
    return [row.tolist() for row in rows]


async def serve(story: ClusterStory, given: argparse.Namespace) -> dict[str, Load]:
    """Run the service and its events; return the load of each tenant."""
    wanted = reference()

    def check(number: int, answer: Any) -> bool:
        row = answer["data"][0]["embedding"]
        pairs = zip(row, wanted[number % len(wanted)], strict=True)
        # Padding a batch changes the order of some sums.
        return all(abs(a - b) <= 1e-4 for a, b in pairs)

    loads: dict[str, Load] = {}
    try:
        story.tell("starting the service: two models, three tenants …")
        url = await story.start()
        story.tell(f"[green]ready[/] at {url}")
        for tenant in (SHOP, BANK, LAB):
            asked = {"name": tenant.name, **tenant.settings}
            made = await story.ask("POST", "/tenants", TenantWithKey, json=asked)
            loads[tenant.name] = tenant.load(url, made.key, given.rate, check)
        shop, bank, lab = loads.values()
        async with under_load(shop, story.watch(shop)), under_load(bank):
            await story.play(given.pause_s, lab)
    finally:
        await story.end()
    return loads


def report(console: Console, story: ClusterStory, loads: dict[str, Load]) -> Any:
    """Print the tables; return the outcome."""
    table = Table("event", "detected in", "recovered in", box=SIMPLE)
    for scene in story.scenes:
        detected = "" if scene.detect_s is None else f"{scene.detect_s:.2f} s"
        table.add_row(scene.title, detected, f"{scene.recovery_s:.2f} s")
    console.print(table)
    columns = ("tenant", "sent", "answered", "refused", "lost", "wrong", "p50 ms")
    table = Table(*columns, "p99 ms", box=SIMPLE)
    found = {name: summarise(load.samples) for name, load in loads.items()}
    is_good = True
    for name, summary in found.items():
        refused = summary.statuses.get(429, 0) if name == LAB.name else 0
        lost = loads[name].sent - summary.answered - refused
        is_good = is_good and not lost and not summary.wrong
        counts = (loads[name].sent, summary.answered, refused, lost, summary.wrong)
        times = (f"{s * 1000:.0f}" for s in (summary.p50_s, summary.p99_s))
        table.add_row(name, *map(str, counts), *times)
    console.print(table)
    if is_good:
        console.print("[green]no request was lost or answered wrongly[/]")
    return {
        "is_good": is_good,
        "tenants": {name: dataclasses.asdict(each) for name, each in found.items()},
        "scenes": [dataclasses.asdict(scene) for scene in story.scenes],
        "moves": story.moves,
    }


def main() -> int:
    """Run the example; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=4.0, help="base rate, requests/s")
    parser.add_argument("--pause-s", type=float, default=3.0, help="between events")
    parser.add_argument("--picture", type=Path, default=Path("multiworld-cluster.png"))
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    given = parser.parse_args()
    console = Console(stderr=given.json, highlight=False, soft_wrap=True)
    root = Path(tempfile.mkdtemp(prefix="multiworld-cluster-"))
    console.print(f"starting a Ray cluster of {NODES} nodes on this machine …")
    began = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {text}")

    with ray_nodes(NODES, CPUS) as nodes:
        end_as_ctrl_c()  # Ray has set a handler of its own
        story = ClusterStory(root, tell, nodes)
        try:
            loads = asyncio.run(serve(story, given))
        except ServeError:
            console.print(f"the logs of the service are in {root}")
            raise
    shutil.rmtree(root, ignore_errors=True)
    outcome = report(console, story, loads)
    samples = {name: load.samples for name, load in loads.items()}
    draw(given.picture, samples, story.scenes, story.replica_counts, story.labels)
    console.print(f"timeline drawn to {given.picture.resolve()}")
    if given.json:
        print(json.dumps(outcome, indent=2))
    return 0 if outcome["is_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
