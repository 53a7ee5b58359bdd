"""Events of the cluster demo, and the replicas that they moved."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from multiworld.demo.cluster.tenants import DemoTenant
from multiworld.demo.pipeline.story import Story
from multiworld.serve.control.answers import (
    DecisionsAnswer,
    DecisionShown,
    ProcessShown,
    TenantWithKey,
    Updated,
)
from multiworld.serve.fleet.entries import HistoryEntry
from multiworld.serve.processes.gateway import USAGE_S
from multiworld.serve.tenants.records import UsageSum
from multiworld.testing.ray_nodes import RayNodes


@dataclass(frozen=True, slots=True)
class Move:
    """A lost replica and its replacement.

    Attributes:
        lost: Name of the lost replica.
        was_on: Node of the lost replica.
        new: Name of the replacement.
        is_on: Node of the replacement.
        why: Reason that the placement gave for this node.
    """

    lost: str
    was_on: str
    new: str
    is_on: str
    why: str


class ClusterStory(Story):
    """Runs the service on Ray nodes, and removes and adds nodes.

    Attributes:
        moves: Replicas lost with a node, and their replacements.
    """

    def __init__(
        self, spec: Path, root: Path, tell: Callable[[str], None], nodes: RayNodes
    ) -> None:
        super().__init__(_with_address(spec, root, nodes), root, tell)
        self._nodes = nodes
        self._labels = [
            f"{model} {stage['name']}"
            for model, spec in self._app["models"].items()
            for stage in spec["stages"]
        ]
        self.moves: list[Move] = []

    @property
    def labels(self) -> list[str]:
        """Labels that replicas are counted under: the stages of the first spec."""
        return self._labels

    def label_of(self, process: ProcessShown) -> str:
        """Return the label that a replica is counted under."""
        spec = self._app["models"].get(process.model)
        name = spec["stages"][process.stage]["name"] if spec else ""
        return f"{process.model} {name}"

    def is_whole(self) -> bool:
        """Tell whether the ready replicas are exactly the desired ones."""
        ready = Counter(
            (p.model, p.stage)
            for p in self.status.processes
            if p.model and p.phase == "ready"
        )
        wanted = {
            (name, stage): count
            for name, model in self.status.wanted.models.items()
            for stage, count in enumerate(model.replicas)
        }
        return ready == wanted

    async def lose_node(self) -> str:
        """Kill the node with the most replicas; return its name.

        Waits until the losses were noticed and every replica has a replacement.

        Raises:
            DemoFailedError: The service did not notice, or did not recover in time.

        Cancellation:
            The node stays lost and the service heals on its own.
        """
        here = {p.name: p.node for p in self.status.processes if p.model}
        counts = Counter(node for node in here.values() if node != "head")
        name = counts.most_common(1)[0][0]
        scene = self.begin(f"{name} is lost")
        since = await self.last_event()
        self.tell(f"[red]killing[/] {name}, which runs {counts[name]} replicas")
        await asyncio.to_thread(self._nodes.remove, name)
        gone = [replica for replica, node in here.items() if node == name]
        lost = [await self.event(since, "lost", replica) for replica in gone]
        scene.detect_s = max(e.at for e in lost) - scene.wall_s
        await self.wait_until(self.is_whole)
        self.finish(scene)
        await self._note_moves(since, dict.fromkeys(gone, name))
        return name

    async def _note_moves(self, since: int, lost: dict[str, str]) -> None:
        params = {"since": since}
        events = await self.ask("GET", "/events", list[HistoryEntry], params=params)
        placed = [e for e in events if e.kind == "placed"]
        for name, node in lost.items():
            post = name.rpartition("/")[0]
            for event in placed:
                if event.name.rpartition("/")[0] == post:
                    placed.remove(event)
                    where, _, why = event.text.partition(": ")
                    is_on = where.rpartition(" on ")[2]
                    self.moves.append(Move(name, node, event.name, is_on, why))
                    self.tell(f"  {name} on {node} → {event.name} on {is_on}: {why}")
                    break

    async def add_node(self, name: str) -> None:
        """Add a lost node again; replicas started later can use it.

        Raises:
            DemoFailedError: The service did not notice the node in time.

        Cancellation:
            The node stays.
        """
        scene = self.begin(f"{name} is back")
        since = await self.last_event()
        # Ray can start a node in the main thread only, which blocks the event loop.
        # The load catches up, and its latencies count from when each request was due.
        self._nodes.add(name)
        await self.event(since, "node added", None)
        self.tell(
            f"[green]added[/] {name} (the load paused while Ray started it, and caught "
            "up)"
        )
        self.finish(scene)

    async def change_models(self, title: str, models: dict[str, Any]) -> None:
        """Change the models of the service by an update, and wait until it is done.

        Raises:
            DemoFailedError: The update was not done in time.
            ServeError: The service refused the update.

        Cancellation:
            The update goes on.
        """
        scene = self.begin(title)
        self._app["models"] = models
        text = yaml.safe_dump(self._app, sort_keys=False)
        asked = {"text": text, "where": "the demo"}
        await self.ask("POST", "/update", Updated, json=asked)
        self.tell(f"[cyan]update[/] {title}")
        await self.wait_until(self.is_whole)
        self.finish(scene)

    async def create_tenant(self, tenant: DemoTenant) -> str:
        """Create a tenant; return its API key.

        Raises:
            ServeError: The service refused.

        Cancellation:
            The tenant may have been created.
        """
        asked = {"name": tenant.name, **tenant.settings}
        made = await self.ask("POST", "/tenants", TenantWithKey, json=asked)
        self.tell(f"tenant {tenant.name}: {tenant.settings}")
        return made.key

    async def wait_until_scaled(self, model: str, *, up: bool) -> None:
        """Wait until a model is scaled up, or back down to its minimum, by its load.

        Raises:
            DemoFailedError: It did not happen in time.

        Cancellation:
            Changes nothing.
        """
        self.tell(f"waiting until {model} is scaled {'up' if up else 'down again'} …")
        least = sum(
            stage.get("autoscaling_config", {}).get("min_replicas")
            or stage.get("replicas", 1)
            for stage in self._app["models"][model]["stages"]
        )

        def condition() -> bool:
            wanted = self.status.wanted.models[model].replicas
            return (sum(wanted) > least) is up and self.is_whole()

        await self.wait_until(condition)
        wanted = self.status.wanted.models[model].replicas
        self.tell(f"[cyan]{model}[/] has {list(wanted)} replicas")

    async def decisions(self) -> tuple[DecisionShown, ...]:
        """Return the controller's last decisions with their reasons.

        Cancellation:
            Changes nothing.
        """
        params = {"last": 50}
        found = await self.ask("GET", "/decisions", DecisionsAnswer, params=params)
        return found.decisions

    async def usage(self) -> list[UsageSum]:
        """Return the usage of every tenant, once all of it was reported.

        Cancellation:
            Changes nothing.
        """
        await asyncio.sleep(2 * USAGE_S)
        return await self.ask("GET", "/usage", list[UsageSum])

    async def add_model(self) -> None:
        """Add a third model, a copy of the second; see ``change_models``.

        Cancellation:
            The update goes on.
        """
        models = copy.deepcopy(self._app["models"])
        models["third"] = copy.deepcopy(models["search"])
        await self.change_models("a third model is added", models)

    async def remove_model(self) -> None:
        """Remove the third model again; see ``change_models``.

        Cancellation:
            The update goes on.
        """
        models = {k: v for k, v in self._app["models"].items() if k != "third"}
        await self.change_models("and removed", models)


def _with_address(spec: Path, root: Path, nodes: RayNodes) -> Path:
    """Write a copy of the spec with this cluster's address; return its path."""
    app = yaml.safe_load(spec.read_text())
    app["ray"] = {"address": nodes.address}
    path = root / "app.yaml"
    path.write_text(yaml.safe_dump(app, sort_keys=False))
    return path
