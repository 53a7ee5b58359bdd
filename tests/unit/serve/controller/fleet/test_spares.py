"""Spares: replicas that are loaded in advance, and take over at once."""

from __future__ import annotations

import random

import pytest

from multiworld.serve.controller.fleet.events import (
    DesiredStateChanged,
    DrainRequested,
    ProcessGone,
)
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    ProcessPhase,
)
from multiworld.serve.wire.routing_table import ReplicaState
from tests.unit.serve.controller.fleet.test_reconciler import Service


def desired(
    *replicas: int, spares: tuple[int, ...] = (0, 1, 0), version: str = "1"
) -> DesiredState:
    return DesiredState({"m": DesiredModel(version, replicas, spares=spares)})


class Spared(Service):
    def __init__(self) -> None:
        super().__init__(1, 2, 1)
        self.handle(DesiredStateChanged(desired(1, 2, 1)))

    def spares(self, version: str = "1") -> list[str]:
        return [
            p.name
            for p in self.fleet.processes.values()
            if p.phase is ProcessPhase.SPARE and p.version == version
        ]

    def at(self, stage: int, phase: ProcessPhase) -> list[str]:
        found = self.fleet.processes.values()
        return [
            p.name
            for p in found
            if (p.stage, p.phase, bool(p.model)) == (stage, phase, True)
        ]


def test_spare_is_loaded_and_gets_no_work() -> None:
    service = Spared()
    assert service.ready() == [1, 2, 1]
    (spare,) = service.spares()
    assert service.fleet.table.replicas[spare].state is ReplicaState.STARTING
    assert service.kinds().count("spare") == 1


def test_spare_takes_over_at_once_and_another_one_starts() -> None:
    service = Spared()
    (spare,) = service.spares()
    lost = service.at(1, ProcessPhase.READY)[0]
    actions = service.fleet.handle(ProcessGone(lost, "it crashed"), service.now)
    assert service.fleet.processes[spare].phase is ProcessPhase.READY, "in this step"
    assert service.fleet.table.replicas[spare].state is ReplicaState.READY
    for action in actions:
        for event in service.carry_out(action):
            service.handle(event)
    service.tick(5.0)
    assert service.ready() == [1, 2, 1]
    assert len(service.spares()) == 1
    assert service.spares() != [spare]


def test_lost_spare_is_replaced() -> None:
    service = Spared()
    (spare,) = service.spares()
    service.handle(ProcessGone(spare, "it crashed"))
    service.tick(5.0)
    assert service.ready() == [1, 2, 1]
    assert len(service.spares()) == 1


def test_scaling_takes_spares_first_and_leaves_as_many() -> None:
    service = Spared()
    (spare,) = service.spares()
    service.handle(DesiredStateChanged(desired(1, 4, 1)))
    assert service.fleet.processes[spare].phase is ProcessPhase.READY
    assert (service.ready(), len(service.spares())) == ([1, 4, 1], 1)
    service.handle(DesiredStateChanged(desired(1, 1, 1)))
    service.tick(2.0)
    assert (service.ready(), len(service.spares())) == ([1, 1, 1], 1)
    service.handle(DesiredStateChanged(desired(1, 0, 1)))
    service.tick(2.0)
    assert (service.ready(), service.spares()) == ([1, 0, 1], [])


def test_number_of_spares_changes_without_a_new_version() -> None:
    service = Spared()
    service.handle(DesiredStateChanged(desired(1, 2, 1, spares=(1, 3, 0))))
    assert (service.ready(), len(service.spares())) == ([1, 2, 1], 4)
    service.handle(DesiredStateChanged(desired(1, 2, 1, spares=())))
    service.tick(2.0)
    assert (service.ready(), service.spares()) == ([1, 2, 1], [])


def test_replica_that_is_to_move_is_relieved_by_a_spare() -> None:
    service = Spared()
    moved = service.at(1, ProcessPhase.READY)[0]
    service.handle(DrainRequested(moved))
    service.tick(5.0)
    assert moved not in service.fleet.processes
    assert (service.ready(), len(service.spares())) == ([1, 2, 1], 1)


def test_update_leaves_no_spare_of_the_old_version() -> None:
    service = Spared()
    service.handle(DesiredStateChanged(desired(1, 2, 1, version="2")))
    service.tick(5.0)
    assert service.fleet.active == {"m": "2"}
    assert (service.ready("2"), len(service.spares("2"))) == ([1, 2, 1], 1)
    assert service.spares("1") == []


def test_spare_without_room_affects_no_replica() -> None:
    service = Service(1, 2, 1)
    service.room = 0
    service.handle(DesiredStateChanged(desired(1, 2, 1)))
    service.tick(5.0)
    assert service.ready() == [1, 2, 1]
    assert list(service.fleet.unplaced) == [("m", "1", 1)]
    assert service.kinds().count("unplaced") == 1


@pytest.mark.parametrize("seed", range(20))
def test_fleet_recovers_from_any_loss(seed: int) -> None:
    service, draw = Spared(), random.Random(seed)
    for _ in range(60):
        names = [n for n, p in service.fleet.processes.items() if p.model]
        if names:  # else all wait to be started again
            service.handle(ProcessGone(draw.choice(names), "it crashed"))
        if draw.random() < 0.3:
            counts = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2)
            spares = draw.randint(0, 2), draw.randint(0, 2), 0
            service.handle(DesiredStateChanged(desired(*counts, spares=spares)))
        service.tick(0.5)
        model = service.fleet.desired.models["m"]
        if any(model.spares):
            pairs = zip(service.ready(), model.replicas, strict=True)
            assert all(ready <= count for ready, count in pairs)
    service.tick(120.0)
    model = service.fleet.desired.models["m"]
    assert service.ready() == list(model.replicas)
    assert len(service.spares()) == sum(model.spares)
