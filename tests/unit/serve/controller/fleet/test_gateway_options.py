"""Gateways whose options an update changes are replaced, without a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiworld.errors import ServeError
from multiworld.serve.controller import status
from multiworld.serve.controller.fleet.actions import Action, Launch
from multiworld.serve.controller.fleet.desired_state import (
    check_update,
    desired_state_of,
)
from multiworld.serve.controller.fleet.events import (
    DesiredStateChanged,
    Event,
    Joined,
    Loaded,
    ProcessGone,
    Unplaced,
)
from multiworld.serve.controller.fleet.state import ProcessPhase
from multiworld.serve.spec.schema import AppSpec
from tests.unit.serve.controller.fleet.test_reconciler import Service


def gateways(service: Service, phase: ProcessPhase) -> set[str]:
    return {
        p.name
        for p in service.fleet.processes.values()
        if p.is_gateway and p.phase is phase
    }


def app(**options: object) -> AppSpec:
    model = {"factory": "m:f", "stages": [{"replicas": 1}]}
    return AppSpec.model_validate(
        {"app": "a", "models": {"m": model}, "gateway": options}
    )


class Slow(Service):
    """Its gateways are launched, and come up when the test says so."""

    def __init__(self) -> None:
        self.is_slow = False
        self.launched: list[str] = []
        super().__init__(1, 1, 1)

    def carry_out(self, action: Action) -> list[Event]:
        if isinstance(action, Launch) and not action.model and self.is_slow:
            self.launched.append(action.name)
            self.alive.add(action.name)
            return []
        return super().carry_out(action)

    def options(self, value: str) -> None:
        wanted = replace(self.fleet.desired, gateway_options=value)
        self.handle(DesiredStateChanged(wanted))


def test_old_gateways_leave_once_their_replacements_are_ready() -> None:
    service = Slow()
    old = gateways(service, ProcessPhase.READY)
    service.is_slow = True
    service.options("new")
    assert gateways(service, ProcessPhase.READY) == old
    assert not status.is_ready(service.fleet)
    (new,) = service.launched
    service.handle(Joined(new))
    service.handle(Loaded(new))
    assert gateways(service, ProcessPhase.READY) == {new}
    assert service.order == [*old]
    assert status.is_ready(service.fleet)


def test_gateway_that_cannot_start_leaves_the_old_one_in_place() -> None:
    service = Slow()
    old = gateways(service, ProcessPhase.READY)
    service.is_slow = True
    service.options("bad")
    for _ in range(5):
        for name in service.launched:
            service.handle(ProcessGone(name, "it crashed"))
        service.tick(5.0)
    assert gateways(service, ProcessPhase.READY) == old
    service.is_slow = False
    service.options("good")
    service.tick(60.0)
    (new,) = gateways(service, ProcessPhase.READY)
    assert {new} != old
    assert service.fleet.processes[new].options == "good"


def test_gateway_that_cannot_be_launched_once_is_launched_again() -> None:
    """The fork server may hang for a moment."""
    service = Slow()
    old = gateways(service, ProcessPhase.READY)
    service.is_slow = True
    service.options("new")
    service.handle(Unplaced(service.launched[0], "the fork server hangs"))
    service.is_slow = False
    service.tick(60.0)
    (new,) = gateways(service, ProcessPhase.READY)
    assert {new} != old
    assert service.fleet.processes[new].options == "new"
    assert status.is_ready(service.fleet)


def test_same_options_replace_nothing() -> None:
    service = Slow()
    old = gateways(service, ProcessPhase.READY)
    service.options(service.fleet.desired.gateway_options)
    assert gateways(service, ProcessPhase.READY) == old
    assert "update" not in service.kinds()


@pytest.mark.parametrize(
    "options", [{"port": 1234}, {"keeper": False}, {"keeper_memory_mb": 7}]
)
def test_what_all_gateways_share_cannot_change(options: dict[str, object]) -> None:
    with pytest.raises(ServeError, match=next(iter(options))):
        check_update(app(), app(**options), {})


def test_only_what_a_gateway_uses_replaces_it() -> None:
    before = desired_state_of(app()).gateway_options
    for controllers in ({"replicas": 2}, {"spare": False}, {"handover_s": 1.0}):
        check_update(app(), app(**controllers), {})
        assert desired_state_of(app(**controllers)).gateway_options == before
    check_update(app(), app(access_log=True), {})
    assert desired_state_of(app(access_log=True)).gateway_options != before
