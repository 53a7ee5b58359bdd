"""The reconciler, which moves the observed state towards the desired state."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.controller.fleet.actions import (
    Action,
    Announce,
    Finish,
    Kill,
    Launch,
    LogEvent,
    Probe,
)
from multiworld.serve.controller.fleet.events import (
    Adopted,
    Applied,
    CapacityChanged,
    DesiredStateChanged,
    DrainRequested,
    Event,
    Joined,
    Loaded,
    ModelNeeded,
    Paused,
    Probed,
    ProcessGone,
    Ticked,
    Unplaced,
)
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.start_order import SLOW_START_S
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    Process,
    ProcessPhase,
)
from multiworld.serve.wire.routing_table import ReplicaState


def desired(*replicas: int, version: str = "1", gateways: int = 1) -> DesiredState:
    return DesiredState({"m": DesiredModel(version, tuple(replicas))}, gateways)


class Service:
    """A fleet whose processes obey at once, unless their version is in `broken`."""

    def __init__(self, *replicas: int) -> None:
        self.fleet = Reconciler(ready_s=50.0, drain_s=20.0)
        self.now = 0.0
        self.broken: set[str] = set()
        self.alive: set[str] = set()
        self.logged: list[LogEvent] = []
        self.order: list[str] = []
        self.answers_probes = True
        self.room = 1000
        self.handle(DesiredStateChanged(desired(*replicas)))

    def handle(self, event: Event) -> None:
        waiting: list[Event] = [event]
        for _ in range(10_000):
            if not waiting:
                return
            for action in self.fleet.handle(waiting.pop(0), self.now):
                waiting += self.carry_out(action)
        raise AssertionError("the reconciler never converges")

    def carry_out(self, action: Action) -> list[Event]:
        match action:
            case Launch(name, _, version, _):
                assert name not in self.alive
                if "/" in name.partition("gateway")[0] and self.room < 1:
                    return [Unplaced(name, "no machine has 2 cpus")]
                self.room -= 1
                self.alive.add(name)
                if version in self.broken:
                    return [Joined(name), ProcessGone(name, "it crashed")]
                return [Joined(name), Loaded(name)]
            case Kill(name):
                self.alive.discard(name)
            case Probe(name, gateway):
                assert gateway in self.alive
                return [Probed(name)] if self.answers_probes else []
            case Finish(name):
                self.order.append(name)
                return [ProcessGone(name, "done")]
            case Announce(table):
                return [Applied(name, table.number) for name in sorted(self.alive)]
            case LogEvent():
                self.logged.append(action)
        return []

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.handle(Ticked())

    def ready(self, version: str = "1") -> list[int]:
        """Return the number of ready replicas by stage."""
        stages = [0, 0, 0]
        for p in self.fleet.processes.values():
            if p.model and p.version == version and p.phase is ProcessPhase.READY:
                stages[p.stage] += 1
        return stages

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.logged]

    def a_worker(self, stage: int) -> str:
        names = self.fleet.processes
        return next(n for n in names if n.startswith(f"m/{stage}/"))


def test_unplaced_replica_waits_and_is_reported_once() -> None:
    service = Service(1, 1, 1)
    service.room = 1
    service.handle(DesiredStateChanged(desired(1, 3, 1)))
    assert service.ready() == [1, 2, 1]
    assert service.fleet.unplaced == {("m", "1", 1): "no machine has 2 cpus"}
    service.tick(10.0)
    assert service.kinds().count("unplaced") == 1
    assert service.fleet.backoff.of(("m", "1", 1)).failures == 0
    service.room = 1
    service.handle(CapacityChanged(64))
    assert service.ready() == [1, 3, 1]
    assert service.fleet.unplaced == {}


def test_drain_is_withdrawn_without_room_for_a_replacement() -> None:
    """Otherwise the stage would be one replica short for good."""
    service = Service(1, 1, 1)
    service.room = 0
    name = service.a_worker(1)
    service.handle(DrainRequested(name))
    service.tick(5.0)
    assert name in service.fleet.processes
    assert service.ready() == [1, 1, 1]
    assert service.kinds().count("kept") == 1
    number = service.fleet.table.number
    service.tick(5.0)
    assert service.fleet.table.number == number, "the table stays as it is"


def test_drain_is_kept_while_nothing_can_start_for_a_moment() -> None:
    """The fork server is replaced, say; there is room."""
    service = Service(1, 1, 1)
    drained = service.a_worker(1)
    launched: list[str] = []

    def fail(action: Action) -> list[Event]:
        if isinstance(action, Launch):
            launched.append(action.name)
            return [Unplaced(action.name, "the fork server hangs", is_for_now=True)]
        return Service.carry_out(service, action)

    service.carry_out = fail  # type: ignore[method-assign]
    service.handle(DrainRequested(drained))
    service.tick(3.0)
    assert launched
    assert "kept" not in service.kinds()
    del service.carry_out
    service.tick(10.0)
    assert drained not in service.fleet.processes
    assert service.ready() == [1, 1, 1]


def test_adopted_replica_that_never_joins_is_replaced() -> None:
    """Its machine may be unreachable, and the replica lost with it."""
    service = Service(1, 1, 1)
    ghost = Process("m/1/99", "m", "1", 1, ProcessPhase.READY, since=service.now)
    service.handle(Adopted(ghost))
    service.handle(DesiredStateChanged(desired(1, 2, 1)))
    assert service.ready() == [1, 2, 1], "it counts until it is overdue"
    service.tick(49.0)
    assert "m/1/99" in service.fleet.processes
    service.tick(3.0)
    assert "m/1/99" not in service.fleet.processes
    assert service.ready() == [1, 2, 1]


def test_unplaced_replica_starts_when_another_leaves() -> None:
    service = Service(1, 1, 1)
    service.room = 0
    service.handle(DesiredStateChanged(desired(1, 2, 1)))
    service.room = 1
    service.tick(2.0)
    assert service.ready() == [1, 2, 1]
    assert "lost" not in service.kinds()


def test_version_without_room_is_rolled_back_after_its_deadline() -> None:
    service = Service(1, 1, 1)
    service.room = 1
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    service.tick(40.0)
    assert service.fleet.active["m"] == "1"
    service.tick(20.0)
    assert "rolled back" in service.kinds()
    assert service.ready() == [1, 1, 1]
    assert service.fleet.unplaced == {}


def test_replicas_are_started_and_ready_after_a_probe() -> None:
    service = Service(1, 2, 1)
    assert service.ready() == [1, 2, 1]
    table = service.fleet.table
    assert len(table.gateways) == 1
    assert {r.state for r in table.replicas.values()} == {ReplicaState.READY}
    assert table.routes["m"].stages == {"1": 3}


def test_readiness_says_how_long_each_phase_of_the_start_took() -> None:
    service = Service(1, 1, 1)
    service.answers_probes = False
    fleet, now = service.fleet, service.now
    gone = fleet.handle(ProcessGone(service.a_worker(1), "killed"), now)
    (name,) = [action.name for action in gone if isinstance(action, Launch)]
    service.alive.add(name)
    for seconds, event in ((1.0, Joined(name)), (3.5, Loaded(name)), (4.0, Ticked())):
        fleet.handle(event, now + seconds)
    actions = fleet.handle(Probed(name), now + 4.25)
    texts = [a.text for a in actions if isinstance(a, LogEvent) and a.kind == "ready"]
    assert texts == [
        f"{name} is ready, 4.25 s after its launch "
        "(1.00 s to start, 2.50 to load, 0.75 to be probed)"
    ]


def test_replica_is_not_ready_without_a_successful_probe() -> None:
    service = Service(1, 1, 1)
    service.answers_probes = False
    name = service.a_worker(1)
    service.handle(ProcessGone(name, "killed"))
    assert service.ready() == [1, 0, 1]
    fresh = service.a_worker(1)
    assert fresh != name
    assert not service.fleet.handle(Probed(fresh, "too late"), service.now)[1:]
    actions = service.fleet.handle(Ticked(), service.now + 0.2)  # not at once
    assert any(isinstance(a, Probe) and a.name == fresh for a in actions)


def test_lost_replica_is_replaced_at_once_under_a_new_name() -> None:
    service = Service(1, 2, 1)
    name = service.a_worker(1)
    service.handle(ProcessGone(name, "silent"))
    assert service.ready() == [1, 2, 1]
    assert name not in service.fleet.processes
    assert name not in service.alive
    service.handle(ProcessGone(name, "again"))  # the loss is reported twice
    assert service.ready() == [1, 2, 1]


def test_scaling_down_drains_the_newest_and_keeps_the_others() -> None:
    service = Service(1, 3, 1)
    names = sorted(n for n in service.fleet.processes if n.startswith("m/1/"))
    service.handle(DesiredStateChanged(desired(1, 1, 1)))
    left = [n for n in service.fleet.processes if n.startswith("m/1/")]
    assert left == names[:1]
    assert sorted(service.order) == names[1:]


def test_draining_waits_until_every_sender_has_the_table() -> None:
    """A sender with the old table would lose the requests that it still sends."""
    service = Service(1, 2, 1)
    sender = service.a_worker(0)
    fleet = service.fleet
    table = fleet.table.number
    actions = fleet.handle(DesiredStateChanged(desired(1, 1, 1)), 0.0)
    assert not any(isinstance(a, Finish) for a in actions)
    assert fleet.table.number == table + 1
    gateway = fleet.table.gateways[0]
    assert not fleet.handle(Applied(gateway, table + 1), 0.0)
    actions = fleet.handle(Applied(sender, table + 1), 0.0)
    assert [type(a) for a in actions] == [Finish]


def test_draining_process_that_does_not_exit_is_killed() -> None:
    service = Service(1, 2, 1)
    name = service.a_worker(1)
    service.fleet.processes[name].phase = ProcessPhase.FINISHING
    service.fleet.processes[name].since = 0.0
    service.tick(21)
    assert name not in service.alive
    assert service.ready() == [1, 2, 1]


def test_requested_drain_replaces_the_process() -> None:
    service = Service(1, 1, 1)
    name = service.a_worker(2)
    service.handle(DrainRequested(name))
    assert service.ready() == [1, 1, 1]
    assert service.order == [name]


def test_crash_loop_is_slowed_down_by_backoff() -> None:
    service = Service(1, 1, 1)
    service.broken.add("1")
    service.handle(ProcessGone(service.a_worker(0), "killed"))
    launched = service.fleet.next_number
    service.tick(60)
    assert service.fleet.next_number - launched < 10
    service.broken.clear()
    service.tick(40)
    assert service.ready() == [1, 1, 1]
    assert any("its replacement starts in" in entry.text for entry in service.logged)


def test_new_version_takes_over_when_all_of_it_is_ready() -> None:
    service = Service(1, 2, 1)
    service.answers_probes = False
    service.handle(DesiredStateChanged(desired(1, 2, 1, version="2")))
    assert service.fleet.table.routes["m"].version == "1"
    assert service.ready("1") == [1, 2, 1]
    service.answers_probes = True
    waiting = [p.name for p in service.fleet.processes.values() if p.probe.gateway]
    for name in waiting:
        service.handle(Probed(name))
    assert service.fleet.table.routes["m"].version == "2"
    assert service.ready("2") == [1, 2, 1]
    assert service.ready("1") == [0, 0, 0]
    stages = [int(name.split("/")[1]) for name in service.order]
    assert stages == [0, 1, 1, 2]


def test_version_that_crashes_is_rolled_back() -> None:
    service = Service(1, 1, 1)
    service.broken.add("2")
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    service.tick(10)
    assert "rolled back" in service.kinds()
    assert service.ready("1") == [1, 1, 1]
    assert service.fleet.desired.models["m"].version == "1"
    assert {p.version for p in service.fleet.processes.values() if p.model} == {"1"}
    assert service.alive == set(service.fleet.processes)


def test_request_starts_the_active_version_from_zero_beside_an_update() -> None:
    """The new version may take long to become ready, or never do so."""
    service = Service(1, 1, 1)
    service.handle(DesiredStateChanged(desired(0, 0, 0)))
    service.handle(ModelNeeded("m"))
    assert service.ready("1") == [0, 0, 0], "that is for the autoscaler"
    service.answers_probes = False
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    assert service.ready("1") == [0, 0, 0]
    service.handle(ModelNeeded("m"))
    assert sum(p.version == "1" for p in service.fleet.processes.values()) == 3


def test_version_that_is_never_ready_is_rolled_back() -> None:
    service = Service(1, 1, 1)
    service.answers_probes = False
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    service.tick(60)
    assert "rolled back" in service.kinds()
    assert service.ready("1") == [1, 1, 1]


def test_model_that_takes_long_to_load_has_a_limit_of_its_own() -> None:
    """``start_s`` replaces ``ready_s`` for its replicas and its update."""
    service = Service(1, 1, 1)
    service.answers_probes = False
    slow = DesiredModel("2", (1, 1, 1), start_s=90.0)
    service.handle(DesiredStateChanged(DesiredState({"m": slow})))
    service.tick(85)
    assert "rolled back" not in service.kinds()
    loading = {n for n, p in service.fleet.processes.items() if p.version == "2"}
    assert loading <= service.alive, "none was replaced after 50 s"
    service.tick(20)
    assert "rolled back" in service.kinds()
    assert service.ready("1") == [1, 1, 1]


def test_pause_of_the_controller_fails_no_process() -> None:
    """The time limits of starts, updates and drains exclude the pause."""
    service = Service(1, 1, 1)
    name = service.a_worker(1)
    service.fleet.processes[name].phase = ProcessPhase.FINISHING
    service.fleet.processes[name].since = 0.0
    service.answers_probes = False
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    service.now += 1000.0
    service.handle(ProcessGone(service.a_worker(0), "lost meanwhile"))
    service.handle(Paused(1000.0))
    assert all(p.since <= service.now for p in service.fleet.processes.values())
    service.tick(10.0)
    assert name in service.alive
    assert "rolled back" not in service.kinds()
    assert service.kinds().count("lost") == 1
    service.tick(45.0)
    assert "rolled back" in service.kinds()


def test_third_version_replaces_one_that_is_not_ready() -> None:
    service = Service(1, 1, 1)
    service.answers_probes = False
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="2")))
    service.answers_probes = True
    service.handle(DesiredStateChanged(desired(1, 1, 1, version="3")))
    assert service.fleet.table.routes["m"].version == "3"
    versions = {p.version for p in service.fleet.processes.values() if p.model}
    assert versions == {"3"}


def test_gateway_is_replaced_and_probes_go_to_another() -> None:
    service = Service(1, 1, 1)
    service.answers_probes = False
    service.handle(ProcessGone(service.a_worker(0), "killed"))
    (gateway,) = service.fleet.table.gateways
    service.answers_probes = True
    service.handle(ProcessGone(gateway, "killed"))
    assert service.fleet.table.gateways != (gateway,)
    assert service.ready() == [1, 1, 1]


def test_adopted_processes_are_kept_and_not_started_again() -> None:
    old = Service(1, 2, 1)
    fleet = Reconciler(first=old.fleet.next_number, number=old.fleet.table.number)
    launched: list[Action] = []
    for process in old.fleet.processes.values():
        launched += fleet.handle(
            Adopted(
                Process(
                    process.name,
                    process.model,
                    process.version,
                    process.stage,
                    process.phase,
                )
            ),
            0.0,
        )
    actions = launched + fleet.handle(DesiredStateChanged(desired(1, 2, 1)), 0.0)
    assert not any(isinstance(a, Launch | Kill | Finish | Probe) for a in actions)
    assert fleet.table.number > old.fleet.table.number


def test_adopted_drain_continues() -> None:
    fleet = Reconciler(first=9, number=5)
    asked = Process("m/0/1", "m", "1", 0, ProcessPhase.READY, is_drain_requested=True)
    fresh = Process("m/0/2", "m", "1", 0, ProcessPhase.LOADED)
    gateway = Process("gateway/3", phase=ProcessPhase.READY, is_joined=True)
    for process in (asked, fresh, gateway):
        fleet.handle(Adopted(process), 0.0)
    actions = fleet.handle(DesiredStateChanged(desired(1)), 0.0)
    assert not any(isinstance(a, Launch | Kill | Finish) for a in actions)
    fleet.handle(Probed("m/0/2"), 1.0)
    assert fresh.phase is ProcessPhase.READY
    assert asked.is_going


def test_adopted_drain_waits_for_senders_without_the_new_table() -> None:
    """Its controller may have died before it announced the drain."""
    fleet = Reconciler(first=9, number=40, active={"m": "1"})
    draining = Process("m/0/2", "m", "1", 0, ProcessPhase.DRAINING)
    fresh = Process("m/0/3", "m", "1", 0, ProcessPhase.READY)
    gateway = Process("gateway/1", phase=ProcessPhase.READY, is_joined=True)
    for process in (draining, fresh, gateway):
        fleet.handle(Adopted(process), 0.0)
    actions = fleet.handle(DesiredStateChanged(desired(1)), 0.0)
    actions += fleet.handle(Joined("gateway/1"), 0.0)
    assert not any(isinstance(a, Finish) for a in actions)
    actions = fleet.handle(Applied("gateway/1", fleet.table.number), 1.0)
    assert Finish("m/0/2") in actions


class Unfinished(Service):
    """A fleet whose replicas never finish."""

    def carry_out(self, action: Action) -> list[Event]:
        return [] if isinstance(action, Finish) else super().carry_out(action)


def test_replicas_of_a_removed_model_keep_the_edge_from_the_last_stage() -> None:
    """The last stage still answers the open streams."""
    service = Unfinished(1, 1, 1)
    text = DesiredModel("1", (1, 1, 1), generates=True)
    service.handle(DesiredStateChanged(DesiredState({"m": text})))
    service.handle(DesiredStateChanged(DesiredState({})))
    table = service.fleet.table
    assert table.routes == {}
    assert {r.state for r in table.replicas.values()} == {ReplicaState.DRAINING}
    assert {r.stages for r in table.replicas.values()} == {3}


def test_model_that_is_no_longer_desired_is_drained() -> None:
    service = Service(1, 1, 1)
    service.handle(DesiredStateChanged(DesiredState({}, 1)))
    assert service.ready() == [0, 0, 0]
    assert service.fleet.table.routes == {}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lose"), st.integers(0, 9)),
        st.tuples(st.just("scale"), st.integers(1, 4)),
        st.tuples(st.just("version"), st.integers(1, 4)),
        st.tuples(st.just("drain"), st.integers(0, 9)),
        st.tuples(st.just("tick"), st.integers(1, 5)),
        st.tuples(st.just("deaf"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_desired_state_is_reached_whatever_happens(
    steps: list[tuple[str, int]],
) -> None:
    service = Service(1, 2, 1)
    scale, version = 2, "1"
    for what, number in steps:
        names = sorted(service.fleet.processes)
        match what:
            case "lose" if names:
                service.handle(ProcessGone(names[number % len(names)], "killed"))
            case "drain" if names:
                service.handle(DrainRequested(names[number % len(names)]))
            case "scale" | "version":
                scale = number if what == "scale" else scale
                version = str(number) if what == "version" else version
                fresh = desired(1, scale, 1, version=version)
                service.handle(DesiredStateChanged(fresh))
            case "tick":
                service.tick(number)
            case "deaf":
                service.answers_probes = bool(number)
    service.answers_probes = True
    service.tick(200)
    final = service.fleet.desired.models["m"]
    assert service.ready(final.version) == list(final.replicas)
    assert len(service.fleet.processes) == 1 + sum(final.replicas)
    assert service.alive == set(service.fleet.processes)
    assert service.fleet.table.routes["m"].version == final.version


def test_stage_scales_to_zero_and_back_whatever_the_others_do() -> None:
    service = Service(1, 2, 1)
    service.handle(DesiredStateChanged(desired(1, 0, 1)))
    assert service.ready() == [1, 0, 1]
    assert len(service.order) == 2, "told to finish, not killed for being late"
    assert "lost" not in service.kinds()
    service.handle(DesiredStateChanged(desired(0, 0, 0)))
    assert service.ready() == [0, 0, 0]
    service.handle(DesiredStateChanged(desired(1, 1, 1)))
    assert service.ready() == [1, 1, 1]
    assert "lost" not in service.kinds()


class Slow:
    """A reconciler whose processes make progress only when the test says so."""

    def __init__(
        self, *replicas: int, starts_at_once: int = 2, ready_s: float = 120.0
    ) -> None:
        self.fleet = Reconciler(starts_at_once=starts_at_once, ready_s=ready_s)
        self.now = 0.0
        self.launched: list[str] = []
        self.probed: list[str] = []
        self.handle(DesiredStateChanged(desired(*replicas)))

    def handle(self, event: Event) -> None:
        self.now += 0.01
        for action in self.fleet.handle(event, self.now):
            if isinstance(action, Launch):
                self.launched.append(action.name)
            if isinstance(action, Probe):
                self.probed.append(action.name)

    def finish(self, name: str) -> None:
        for event in (Joined(name), Loaded(name), Probed(name)):
            self.handle(event)

    def stages(self) -> list[str]:
        """Return the stages launched since the last call."""
        launched, self.launched = self.launched, []
        return [name.rpartition("/")[0] for name in launched]


def test_starts_are_limited_and_each_stage_gets_one_first() -> None:
    """A start ends when the replica has loaded, before it is ready."""
    slow = Slow(2, 2, 2)
    first = slow.launched[1:]
    assert slow.stages() == ["gateway", "m/0", "m/1"]
    slow.handle(Joined(first[0]))
    assert slow.stages() == []
    slow.handle(Loaded(first[0]))
    assert slow.stages() == ["m/2"]
    slow.handle(Joined(first[1]))
    slow.handle(Loaded(first[1]))
    assert slow.stages() == ["m/0"]


def test_replica_is_probed_once_all_stages_have_loaded() -> None:
    """A probe passes through all stages, and five failed probes end a replica."""
    slow = Slow(1, 1, 1)
    gateway, first, second = slow.launched
    for name in (gateway, first, second):
        slow.handle(Joined(name))
        slow.handle(Loaded(name))
    assert slow.probed == []
    third = slow.launched[-1]
    slow.handle(Joined(third))
    assert slow.probed == []
    slow.handle(Loaded(third))
    assert sorted(slow.probed) == sorted([first, second, third])


def test_replica_that_waits_for_another_stage_is_not_late() -> None:
    slow = Slow(1, 1, 1, ready_s=100.0)
    gateway, first, second = slow.launched
    for name in (gateway, first, second):
        slow.handle(Joined(name))
        slow.handle(Loaded(name))
    third = slow.launched[-1]
    slow.now += 101.0
    slow.handle(Ticked())
    assert {first, second} <= slow.fleet.processes.keys()
    slow.now += 2.0
    slow.handle(Ticked())
    assert third not in slow.fleet.processes


def test_replica_that_waits_for_a_gateway_is_not_late() -> None:
    """Only a gateway can probe it."""
    slow = Slow(1, ready_s=100.0)
    gateway, replica = slow.launched
    slow.handle(Joined(replica))
    slow.handle(Loaded(replica))
    slow.now += 101.0
    slow.handle(Ticked())
    assert replica in slow.fleet.processes
    slow.now += 2.0
    slow.handle(Ticked())
    assert gateway not in slow.fleet.processes


def test_new_version_without_replicas_is_not_active() -> None:
    """A version becomes active when it has answered a probe."""
    service = Service(1, 1, 1)
    service.handle(DesiredStateChanged(desired(0, 0, 0, version="2")))
    assert service.fleet.active == {"m": "1"}
    assert service.ready() == [1, 1, 1]


def test_stage_that_was_lost_does_not_wait_for_starts_that_hang() -> None:
    slow = Slow(1, 1, 1, starts_at_once=8)
    for name in slow.launched[1:]:
        slow.finish(name)
    slow.stages()
    slow.handle(CapacityChanged(2))
    slow.handle(DesiredStateChanged(desired(4, 2, 1)))
    assert len(slow.stages()) == 2  # they hang
    lost = next(n for n in slow.fleet.processes if n.startswith("m/2/"))
    slow.handle(ProcessGone(lost, "killed"))
    assert slow.stages() == []
    slow.now += SLOW_START_S
    slow.handle(Ticked())
    assert slow.stages() == ["m/2"]
    slow.handle(Ticked())
    assert slow.stages() == []


def test_stages_without_a_replica_pass_slow_starts_but_not_all_at_once() -> None:
    """Starts may be slow because there are many of them."""
    slow = Slow(*[1] * 9, starts_at_once=2)
    assert slow.stages() == ["gateway", "m/0", "m/1"]
    for passing in (["m/2", "m/3"], [], []):
        slow.now += SLOW_START_S
        slow.handle(Ticked())
        assert slow.stages() == passing
    slow.finish("m/0/2")
    assert slow.stages() == ["m/4"]


def test_replacement_is_started_before_what_grows() -> None:
    slow = Slow(2, 1, 1, starts_at_once=8)
    for name in slow.launched[1:]:
        slow.finish(name)
    slow.stages()
    slow.handle(CapacityChanged(1))
    slow.handle(DesiredStateChanged(desired(6, 1, 1)))
    assert slow.stages() == ["m/0"]
    of = slow.fleet.processes
    slow.handle(ProcessGone(next(n for n in of if n.startswith("m/2/")), "killed"))
    slow.finish(next(n for n, p in of.items() if p.model and p.is_starting))
    assert slow.stages() == ["m/2"]


def test_table_lists_a_replica_once_it_can_be_reached() -> None:
    """Otherwise its peers would retry in vain."""
    slow = Slow(1, 1, 1)
    name = slow.launched[1]
    assert name not in slow.fleet.table.replicas
    assert not slow.fleet.table.gateways
    slow.handle(Joined(name))
    assert slow.fleet.table.replicas[name].state is ReplicaState.STARTING
    slow.handle(Joined(slow.launched[0]))
    assert slow.fleet.table.gateways == (slow.launched[0],)


def test_update_has_its_time_again_with_every_replica_that_is_ready() -> None:
    """Many replicas may load one after another; only a lack of progress rolls back."""
    slow = Slow(3, starts_at_once=1, ready_s=10.0)
    slow.finish(slow.launched[0])
    for _ in range(3):
        slow.finish(slow.launched[-1])
    slow.stages()
    slow.handle(DesiredStateChanged(desired(3, version="2")))
    for _ in range(3):
        slow.now += 8.0
        slow.handle(Ticked())
        slow.finish(slow.launched[-1])
    assert slow.fleet.active == {"m": "2"}


def test_update_that_waits_for_the_starts_of_another_has_its_whole_time() -> None:
    """The models of a spec update together, but only one replica may load at a time."""

    def all_of(version: str) -> DesiredState:
        return DesiredState({n: DesiredModel(version, (1,)) for n in "abcd"}, 1)

    slow = Slow(1, starts_at_once=1, ready_s=10.0)
    slow.finish(slow.launched[0])
    slow.handle(DesiredStateChanged(all_of("1")))
    for _ in "abcd":
        slow.finish(slow.launched[-1])
    slow.stages()
    slow.handle(DesiredStateChanged(all_of("2")))
    for _ in "abcd":
        slow.handle(Joined(slow.launched[-1]))
        slow.now += 8.0
        slow.handle(Ticked())
        slow.finish(slow.launched[-1])
    assert slow.fleet.active == dict.fromkeys("abcd", "2")


def test_replicas_with_other_hardware_fingerprints_are_named() -> None:
    service = Service(1, 2, 1)
    workers = [name for name in service.fleet.processes if name.startswith("m/")]
    for name in workers[:-1]:
        service.handle(Loaded(name, "epyc"))
    assert "fingerprint" not in service.kinds()
    service.handle(Loaded(workers[-1], "xeon"))
    assert service.kinds().count("fingerprint") == 1
    found = service.fleet.table.replicas
    assert sorted(r.fingerprint for r in found.values()) == ["epyc"] * 3 + ["xeon"]


def test_replica_that_waited_for_another_stage_has_the_rest_of_its_time() -> None:
    """The wait counts neither as start time nor in the autoscaler's estimate of it."""
    slow = Slow(1, 1, 1, ready_s=100.0)
    gateway, first, second = slow.launched
    for name in (gateway, first, second):
        slow.handle(Joined(name))
        slow.handle(Loaded(name))
    third = slow.launched[-1]
    slow.now += 90.0
    slow.handle(Joined(third))
    slow.now += 50.0
    slow.handle(ProcessGone(third, "it crashed"))
    slow.now += 20.0
    slow.handle(Ticked())
    fourth = slow.launched[-1]
    assert fourth.startswith("m/2/")
    slow.handle(Joined(fourth))
    slow.handle(Loaded(fourth))
    slow.handle(Ticked())
    assert {first, second, fourth} <= slow.fleet.processes.keys()
    slow.handle(Probed(first))
    assert slow.fleet.start_s[("m", "1", 0)] < 1.0


def test_stages_beside_one_at_zero_are_ready_without_a_probe() -> None:
    """A probe could not pass the stage at zero; the first request wakes that stage."""
    slow = Slow(1, 0, 1)
    for name in list(slow.launched):
        slow.handle(Joined(name))
        slow.handle(Loaded(name))
    phases = {p.stage: p.phase for p in slow.fleet.processes.values() if p.model}
    assert phases == {0: ProcessPhase.READY, 2: ProcessPhase.READY}
    assert slow.probed == []
    slow.handle(DesiredStateChanged(desired(1, 1, 1)))
    woken = slow.launched[-1]
    slow.handle(Joined(woken))
    slow.handle(Loaded(woken))
    assert slow.probed == [woken]


def test_probe_that_failed_is_repeated_with_twice_the_time() -> None:
    """The limit is the model's deadline, because a request may take that long."""
    fleet, now = Reconciler(ready_s=1000.0), 0.0
    models = {"m": DesiredModel("1", (1,), deadline_s=35.0)}
    found: list[float] = []
    waiting: list[Event] = [DesiredStateChanged(DesiredState(models, 1))]
    while len(found) < 5:
        now += 1.0
        for action in fleet.handle(waiting.pop(0) if waiting else Ticked(), now):
            if isinstance(action, Launch):
                waiting += [Joined(action.name), Loaded(action.name)]
            if isinstance(action, Probe):
                found.append(action.limit_s)
                waiting.append(Probed(action.name, "too late"))
    assert found == [10.0, 20.0, 35.0, 35.0, 35.0]


def test_draining_does_not_wait_for_a_process_that_starts() -> None:
    """It has no table yet and will get the latest one."""
    slow = Slow(1, 2, 1)
    for _ in range(9):
        for name in list(slow.launched):
            process = slow.fleet.processes.get(name)
            if process and process.phase is ProcessPhase.LAUNCHING:
                slow.finish(name)
    assert len(slow.fleet.processes) == 5
    slow.handle(DesiredStateChanged(desired(2, 2, 1)))
    slow.handle(DesiredStateChanged(desired(2, 1, 1)))
    (going,) = [p for p in slow.fleet.processes.values() if p.is_going]
    (new,) = [
        p for p in slow.fleet.processes.values() if p.phase is ProcessPhase.LAUNCHING
    ]
    for process in list(slow.fleet.processes.values()):
        if process is not new:
            slow.handle(Applied(process.name, slow.fleet.table.number))
    assert going.phase is ProcessPhase.FINISHING
