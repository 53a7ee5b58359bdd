"""Operations of administrators, on a real reconciler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiworld.config import MIB
from multiworld.errors import PlacementError, ServeError
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.desired_state import desired_state_of
from multiworld.serve.controller.fleet.events import DesiredStateChanged
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import DesiredState
from multiworld.serve.controller.operations import ConfirmationNeededError, Operations
from multiworld.serve.controller.placement.manager import PlacementManager
from multiworld.serve.controller.versions import CurrentSpec, Versions
from multiworld.serve.engine.models import imported_sources
from multiworld.serve.machines.amounts import Location, Node, needs_of
from multiworld.serve.machines.assignment import assign
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import AppSpec


def app(version: str) -> AppSpec:
    bounds = {"min_replicas": 0, "max_replicas": 9, "initial_replicas": 2}
    stages: list[dict[str, Any]] = [{"name": "pre"}] if version == "3" else []
    stages += [
        {"name": "a", "replicas": 2},
        {"name": "b", "autoscaling_config": bounds},
    ]
    model = {"factory": "x:y", "version": version, "stages": stages}
    return AppSpec.model_validate({"app": "s", "models": {"m": model}})


class Service:
    """A fleet in an update to version `new`, in which no process becomes ready."""

    def __init__(self, new: str = "2", cores: float = 9) -> None:
        self.fleet = Reconciler(ready_s=50.0, drain_s=20.0)
        versions = Versions(None)
        for version in ("1", new):
            versions.add(app(version))
            self.want(desired_state_of(app(version)))
        self.room = 99
        placement = SimpleNamespace(
            admit=lambda wanted, model: None,
            nodes=[SimpleNamespace(cpus=cores)],
            bookings=SimpleNamespace(admit=self.admit),
        )
        history = SimpleNamespace(say=lambda *words: None)
        fakes: Any = SimpleNamespace(
            reconciliation=SimpleNamespace(want=self.want),
            placement=placement,
            history=history,
        )
        self.operations = Operations(
            CurrentSpec(app(new)),
            self.fleet,
            fakes.reconciliation,
            versions,
            fakes.placement,
            cast("Any", None),
            cast("Any", None),
            fakes.history,
        )

    def admit(self, asks: list[Any]) -> None:
        if sum(count for _, _, count, _ in asks) > self.room:
            raise PlacementError("no room")

    def want(self, wanted: DesiredState) -> None:
        self.fleet.handle(DesiredStateChanged(wanted), 0.0)


def test_scale_during_an_update_reaches_the_version_that_serves() -> None:
    """It carries the load, and it remains if the update is rolled back."""
    service = Service()
    assert service.fleet.active == {"m": "1"}
    service.operations.scale("m", "b", 4)
    for version in ("1", "2"):
        model = service.fleet.version("m", version)
        assert model is not None
        assert model.replicas == (2, 4)


def test_scale_during_an_update_is_of_the_stage_with_that_name() -> None:
    """The new version may have another stage before it."""
    service = Service("3")
    service.operations.scale("m", "b", 4)
    service.operations.scale("m", "pre", 3)
    found = [service.fleet.version("m", version) for version in ("1", "3")]
    assert [model and model.replicas for model in found] == [(2, 4), (3, 2, 4)]


def test_scale_during_an_update_leaves_room_for_the_new_version() -> None:
    """Without room, the update would be rolled back."""
    service = Service()
    service.room = 10
    service.operations.scale("m", "b", 4)
    model = service.fleet.version("m", "1")
    assert model is not None
    assert model.replicas == (2, 2)


def test_scale_to_zero_waits_for_the_end_of_an_update() -> None:
    """A version without replicas would become active before it has answered."""
    service = Service()
    with pytest.raises(ServeError, match="an update of 'm' is in progress"):
        service.operations.scale("m", "b", 0)


@pytest.mark.parametrize(("cores", "most"), [(1, 16), (9, 36)])
def test_far_more_replicas_than_cores_need_a_confirmation(
    cores: float, most: int
) -> None:
    """A slip of the keyboard would otherwise make every model slow."""
    service = Service(cores=cores)
    operations = service.operations

    def replicas() -> tuple[int, ...]:
        return service.fleet.desired.models["m"].replicas

    operations.scale("m", "a", most - 2)
    assert replicas() == (most - 2, 2)
    what = f"{most + 1} replicas would share {cores} cores"
    with pytest.raises(ConfirmationNeededError, match=what):
        operations.scale("m", "a", most - 1)
    assert replicas() == (most - 2, 2)
    operations.scale("m", "a", most - 1, is_confirmed=True)
    assert replicas() == (most - 1, 2)
    operations.scale("m", "b", 1)  # fewer replicas than before need none
    assert replicas() == (most - 1, 1)


SPECS = """models:
  a: {factory: "os.path:join", stages: [{replicas: 2, memory_mb: 1000, nodes: [big]}]}
  b: {factory: "os.path:join", version: VERSION, stages: [{memory_mb: 100}]}
"""


class Machines:
    def __init__(self) -> None:
        self._nodes = [Node("small", 8, 1000 * MIB), Node("big", 8, 2100 * MIB)]

    def nodes(self) -> list[Node]:
        return self._nodes

    def lose(self) -> None:
        self._nodes = self._nodes[:1]

    def trouble(self) -> str:
        return ""


def after_a_loss() -> tuple[Operations, list[DesiredState]]:
    """Return operations of a service whose model `a` has lost its machine."""
    app = parse_spec(SPECS.replace("VERSION", "1"))
    versions, fleet, history, machines = Versions(), Reconciler(), History(), Machines()
    versions.add(app)
    placement = PlacementManager(
        cast("Any", machines),
        fleet,
        history,
        DecisionLog(),
        assign,
        versions.specs,
        lambda event: None,
    )
    fleet.handle(DesiredStateChanged(desired_state_of(app)), 0.0)
    need = needs_of(app.models["b"])[0]
    placement.bookings.ledger.restore("b/0/3", ("b", "1", 0), Location("small"), need)
    machines.lose()
    placement.bookings.set_nodes(machines.nodes())
    wanted: list[DesiredState] = []
    reconciliation: Any = SimpleNamespace(want=wanted.append)
    links: Any = SimpleNamespace(send_gateways=lambda order: None)
    made = Operations(
        CurrentSpec(app),
        fleet,
        reconciliation,
        versions,
        placement,
        cast("Any", None),
        links,
        history,
    )
    return made, wanted


def test_model_without_room_holds_up_no_other() -> None:
    operations, wanted = after_a_loss()
    operations.scale("b", "0", 2)
    assert wanted[-1].models["b"].replicas == (2,)
    operations.update(parse_spec(SPECS.replace("VERSION", "2")))
    assert wanted[-1].models["b"].version == "2"
    for count in (11, 2):
        model, replicas = ("b", count) if count > 2 else ("a", 3)
        with pytest.raises(PlacementError, match=f"of {replicas} replicas"):
            operations.scale(model, "0", replicas)
    with pytest.raises(PlacementError, match="of 3 replicas"):
        operations.update(
            parse_spec(
                SPECS.replace("VERSION", "1").replace("replicas: 2", "replicas: 3")
            )
        )


def test_version_that_was_rolled_back_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its code may have changed since; the version that serves is not checked."""
    checked: list[str] = []
    monkeypatch.setattr(imported_sources, "check", checked.append)
    operations, _ = after_a_loss()
    for version, count in (("2", 2), ("2", 2), ("1", 0)):  # 1 stays in effect
        checked.clear()
        operations.update(parse_spec(SPECS.replace("VERSION", version)))
        assert len(checked) == count
