"""The reconciler: moves the observed state towards the desired state. Pure.

A rolling update starts a whole pipeline of the new version. Once all its replicas are
ready, new requests go to it, and the old version drains, stage by stage. A version that
does not become ready is rolled back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from multiworld.errors import ServeError
from multiworld.serve.controller.fleet import events
from multiworld.serve.controller.fleet.actions import (
    Action,
    Announce,
    Finish,
    GiveUp,
    Kill,
    Launch,
    LogEvent,
    Probe,
)
from multiworld.serve.controller.fleet.backoff import CrashBackoff
from multiworld.serve.controller.fleet.routing_tables import routing_table_of
from multiworld.serve.controller.fleet.start_order import (
    SLOW_START_S,
    Shortage,
    StageKey,
    next_starts,
    urgent_starts,
)
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    Process,
    ProcessPhase,
)
from multiworld.serve.deadlines import PROBE_GRACE_S, PROBE_S
from multiworld.serve.spec.identity import CHANGED
from multiworld.serve.wire.routing_table import RoutingTable


class Reconciler:
    """Turns events into actions that move the observed state to the desired one."""

    def __init__(
        self,
        *,
        # Maximum seconds for a process to become ready, and for which an update may
        # make no progress.
        ready_s: float = 120.0,
        drain_s: float = 60.0,  # maximum time for a draining process to finish its work
        first: int = 1,
        number: int = 0,
        # By model: the version that an earlier controller has activated.
        active: dict[str, str] | None = None,
        starts_at_once: int = 64,
    ) -> None:
        self.starts_at_once = starts_at_once
        self.ready_s, self.drain_s = ready_s, drain_s
        self.next_number = first
        self.table = RoutingTable(number=number)
        self.desired = DesiredState()
        # By model: the version that gets new requests.
        self.active: dict[str, str] = dict(active or {})
        self.processes: dict[str, Process] = {}
        self.backoff = CrashBackoff()
        self._versions: dict[tuple[str, str], DesiredModel] = {}
        self._updates: dict[str, tuple[str, float]] = {}
        # By stage: why a replica cannot be placed.
        self.unplaced: dict[StageKey, str] = {}
        # By stage: seconds from launch to readiness in the last start.
        self.start_s: dict[StageKey, float] = {}
        self._retry_at: dict[StageKey, float] = {}
        # By stage: replicas lost since the controller started.
        self.losses: Counter[StageKey] = Counter()
        self._lost: dict[StageKey, int] = {}

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Apply an event at a monotonic time; return the resulting actions in order."""
        if isinstance(event, events.Applied):
            # Every process reports every table that it applies. Only draining processes
            # need these reports, so reconcile only if a draining process can finish.
            if event.name in self.processes:
                self.processes[event.name].applied = event.number
            finished: list[Action] = list(self._finish())
            return [*finished, *self._reconcile(now)] if finished else []
        self._note_waits(now)
        actions = list(self._observe(event, now))
        self._note_waits(now)
        if isinstance(event, events.Adopted):
            # Do not reconcile yet: the desired state is set once all processes are
            # adopted.
            return actions
        return [*actions, *self._reconcile(now)]

    # Observing.

    def _observe(self, event: events.Event, now: float) -> Iterator[Action]:
        match event:
            case events.DesiredStateChanged(desired):
                yield from self._set_desired(desired, now)
            case events.Adopted(process):
                # If the process is draining, its senders may not have applied a table
                # that says so: wait until they have applied the next one.
                process.drain_number = self.table.number + 1
                self.processes[process.name] = process
            case events.Joined(name) if name in self.processes:
                yield from self._joined(self.processes[name], now)
            case events.Loaded(name, fingerprint, weights, noise) if (
                name in self.processes
            ):
                self.processes[name].weights = weights
                self.processes[name].noise = noise
                yield from self._identified(self.processes[name], fingerprint)
                if not self.processes[name].is_gateway:
                    self._advance(name, ProcessPhase.JOINED, ProcessPhase.LOADED, now)
                    self._restart_update_deadline(self.processes[name], now)
                elif self._advance(name, ProcessPhase.JOINED, ProcessPhase.READY, now):
                    yield LogEvent("ready", f"{name} listens", name)
            case events.Probed(name, error):
                yield from self._probed(name, error, now)
            case events.ProcessGone():
                yield from self._gone(event, now)
            case events.Unplaced(name) if name in self.processes:
                yield from self._unplaced(event, now)
            case events.CapacityChanged(starts_at_once):
                self.starts_at_once = starts_at_once
                self._retry_at.clear()
            case events.DrainRequested(name) if name in self.processes:
                self.processes[name].is_drain_requested = True
            case events.ModelNeeded(model) if model in self._updates:
                # The autoscaler skips models that are being updated, so start the old
                # version, which is still active, here.
                key = model, self.active[model]
                if (old := self._versions.get(key)) is not None:
                    counts = tuple(max(1, count) for count in old.replicas)
                    self._versions[key] = replace(old, replicas=counts)
            case events.Paused(seconds):
                self._postpone(seconds, now)
            case events.Ticked():
                yield from self._check_deadlines(now)

    def _advance(
        self, name: str, before: ProcessPhase, after: ProcessPhase, now: float
    ) -> bool:
        """Move a process to the next phase; return False if it is in another phase."""
        process = self.processes.get(name)
        if process is None or process.phase is not before:
            return False
        process.phase = after
        process.entered[after] = now
        return True

    def _joined(self, process: Process, now: float) -> Iterator[Action]:
        self._advance(process.name, ProcessPhase.LAUNCHING, ProcessPhase.JOINED, now)
        process.is_joined = True
        if process.phase is ProcessPhase.FINISHING:
            # It has rejoined, so the first order may have been lost.
            yield Finish(process.name)
        for other in self.processes.values():
            if other.probe.gateway == process.name:
                other.probe.gateway = ""

    @property
    def sizes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Numbers of replicas of all versions that are desired or still run."""
        return {key: model.replicas for key, model in self._versions.items()}

    def version(self, name: str, version: str) -> DesiredModel | None:
        return self._versions.get((name, version))

    def remember(self, name: str, model: DesiredModel) -> None:
        """Record a version that is no longer desired but may still run."""
        self._versions[name, model.version] = model

    def _set_desired(self, desired: DesiredState, now: float) -> Iterator[Action]:
        self.desired = desired
        yield from self._replace_gateways()
        for name in self.active.keys() - desired.models.keys():
            del self.active[name]
            self._updates.pop(name, None)
        for name, model in desired.models.items():
            self._versions[name, model.version] = model
            active = self.active.setdefault(name, model.version)
            if active == model.version:
                self._updates.pop(name, None)
            elif self._updates.get(name, ("", 0.0))[0] != model.version:
                self._updates[name] = model.version, now
                for stage in range(len(model.replicas)):
                    self.backoff.forget((name, model.version, stage))
                text = f"{name}: from version {active} to {model.version}"
                yield LogEvent("update", text)

    def _replace_gateways(self) -> Iterator[Action]:
        """Replace the gateways whose options differ from the desired ones."""
        wanted = self.desired.gateway_options
        old = [
            each
            for each in self._gateways()
            if each.options != wanted and not each.is_drain_requested
        ]
        for each in old:
            each.is_drain_requested = True
        if old:
            names = ", ".join(each.name for each in old)
            yield LogEvent("update", f"gateways with other options replace {names}")

    def _probed(self, name: str, error: str | None, now: float) -> Iterator[Action]:
        process = self.processes.get(name)
        if process is None:
            return
        probe = process.probe
        probe.gateway = ""
        if error is not None:
            probe.not_before = now + PROBE_PAUSE_S * 2.0 ** min(probe.failures, 5)
            probe.failures += 1
            yield LogEvent("probe failed", f"{name}: {error}", name)
            if probe.failures >= PROBE_FAILURES:
                why = f"{probe.failures} probes failed in a row, the last: {error}"
                yield from self._gone(events.ProcessGone(name, why), now)
        elif process.phase is ProcessPhase.LOADED:
            process.phase = ProcessPhase.SPARE  # or READY, as decided below
            took_s = now - process.since
            process.since = now
            self.start_s[_key_of(process)] = took_s
            self._restart_update_deadline(process, now)
            is_needed = self._lacks(_key_of(process))
            if is_needed:
                process.phase = ProcessPhase.READY
            what = "is ready" if is_needed else "is a spare"
            # ``since`` moves if the controller was paused, so use the launch time.
            launched_at = process.entered.get(
                ProcessPhase.LAUNCHING, now - took_s - process.waited_s
            )
            text = f"{name} {what}, {now - launched_at:.2f} s after its launch"
            text += _by_phase(process, launched_at, now)
            yield LogEvent("ready" if is_needed else "spare", text, name)

    def _lacks(self, key: StageKey) -> bool:
        """Return whether a stage has fewer ready replicas than it should have."""
        known = self._versions.get(key[:2])
        if known is None or not any(known.spares):
            return True  # without spares, every probed replica gets work
        ready = sum(
            p.phase is ProcessPhase.READY and not p.is_drain_requested
            for p in self._processes_of(key)
        )
        return ready < known.replicas[key[2]]

    def _promote(self, key: StageKey, now: float) -> Iterator[Action]:
        """Give work to spares of a stage that lacks ready replicas, oldest first."""
        spares = [p for p in self._processes_of(key) if p.phase is ProcessPhase.SPARE]
        for process in sorted(spares, key=lambda p: _number(p.name)):
            if not self._lacks(key):
                return
            process.phase, process.since = ProcessPhase.READY, now
            yield LogEvent(
                "ready", f"{process.name}, a spare, takes over", process.name
            )

    def _restart_update_deadline(self, process: Process, now: float) -> None:
        """Restart the deadline of a model's update after progress of a replica."""
        version, _ = self._updates.get(process.model, (None, 0.0))
        if version == process.version:
            self._updates[process.model] = version, now

    def _updates_wait(self, keys: set[StageKey], now: float) -> None:
        """Restart the deadlines of updates whose starts wait for other starts."""
        for key in keys - self.unplaced.keys():
            model, version, _ = key
            if self._updates.get(model, ("", 0.0))[0] != version:
                continue
            own = [p for p in self.processes.values() if p.model == model]
            if not any(p.is_starting and p.version == version for p in own):
                self._updates[model] = version, now

    def _gone(self, event: events.ProcessGone, now: float) -> Iterator[Action]:
        process = self.processes.pop(event.name, None)
        if process is None:
            return
        for other in self.processes.values():
            if other.probe.gateway == process.name:
                other.probe.gateway = ""
        yield Kill(event.name)
        if process.is_going:
            yield LogEvent("left", f"{event.name}: {event.why}", event.name)
            return
        is_up = process.phase in (ProcessPhase.READY, ProcessPhase.SPARE)
        ready_s = now - process.since if is_up else None
        key, cause = _key_of(process), event.cause or event.why
        self._lost[key] = self._lost.get(key, 0) + 1
        self.losses[key] += 1
        pause_s = self.backoff.record_failure(key, ready_s, now, cause)
        text = f"{event.name}: {event.why}"
        if pause_s:
            text += f"; its replacement starts in {pause_s:.1f} s"
        is_refused = CHANGED in cause
        yield LogEvent("refused" if is_refused else "lost", text, event.name)
        failures = self.backoff.of(key).same
        is_first = ready_s is None and key not in self.start_s
        is_first = is_first and not process.is_gateway and key[0] not in self._updates
        if is_first and failures == FIRST_START_FAILURES:
            yield GiveUp(process.model, process.stage, failures, cause)

    def _unplaced(self, event: events.Unplaced, now: float) -> Iterator[Action]:
        """Schedule another attempt: a replica may exit, or a machine may be added."""
        process, why = self.processes.pop(event.name), event.why
        key = _key_of(process)
        self._retry_at[key] = now + PLACEMENT_RETRY_S
        if self.unplaced.get(key) != why:
            self.unplaced[key] = why
            what = f"{key[0]}/{key[2]} (version {key[1]})" if key[0] else "a gateway"
            text = f"{what} cannot be placed: {why}"
            yield LogEvent("unplaced", text)
        for other in self._processes_of(key):
            is_outdated = other.options != self.desired.gateway_options
            if other.is_gateway and is_outdated:
                continue  # it serves until its replacement is ready
            if other.is_drain_requested and not event.is_for_now:
                # Its replacement cannot be placed, so cancel the drain.
                other.is_drain_requested = False
                yield LogEvent(
                    "kept", f"{other.name} stays: there is no room for its replacement"
                )

    def _check_deadlines(self, now: float) -> Iterator[Action]:
        for process in list(self.processes.values()):
            if process.is_going:
                limit_s, why = self.drain_s, "not drained"
            elif process.is_starting:
                limit_s = self._start_s_of(process.model, process.version)
                why = "not ready"
            elif not process.is_joined:
                limit_s, why = self.ready_s, "adopted, but did not join"
            else:
                continue
            if now - process.since > limit_s:
                why = f"{why} within {limit_s:g} s"
                yield from self._gone(events.ProcessGone(process.name, why), now)
        for name, (_, began) in list(self._updates.items()):
            model = self.desired.models[name]
            failures = max(
                self.backoff.of((name, model.version, stage)).failures
                for stage in range(len(model.replicas))
            )
            start_s = self._start_s_of(name, model.version)
            if now - began > start_s or failures >= ROLL_BACK_FAILURES:
                yield from self._roll_back(name, model.version)

    def _note_waits(self, now: float) -> None:
        """Exclude waits for other stages and for a gateway from the start time."""
        has_gateway = any(self._probers())
        if not has_gateway:
            updates = self._updates.items()
            self._updates = {name: (version, now) for name, (version, _) in updates}
        for process in self.processes.values():
            if process.waited_at is not None:
                process.since += now - process.waited_at
                process.waited_s += now - process.waited_at
            is_waiting = (
                process.phase is ProcessPhase.LOADED
                and not process.is_gateway
                and not (
                    has_gateway and self._is_complete(process.model, process.version)
                )
            )
            process.waited_at = now if is_waiting else None

    def _postpone(self, seconds: float, now: float) -> None:
        """Extend all deadlines by a pause, at most to their full length from now."""
        for process in self.processes.values():
            if process.waited_at is None:
                process.since = min(now, process.since + seconds)
            process.probe.asked_at = min(now, process.probe.asked_at + seconds)
        self._updates = {
            name: (version, min(now, at + seconds))
            for name, (version, at) in self._updates.items()
        }

    def _start_s_of(self, model: str, version: str) -> float:
        found = self._versions.get((model, version))
        return self.ready_s if found is None else found.start_s or self.ready_s

    def _roll_back(self, name: str, version: str) -> Iterator[Action]:
        del self._updates[name]
        old = self._versions[name, self.active[name]]
        self.desired = replace(self.desired, models={**self.desired.models, name: old})
        text = f"{name}: version {version} is not ready; {old.version} stays active"
        for stage in range(len(self._versions[name, version].replicas)):
            key = name, version, stage
            if cause := self.backoff.of(key).cause or self.unplaced.get(key, ""):
                text += f"; stage {stage}: {cause}"
        yield LogEvent("rolled back", text)
        for process in list(self.processes.values()):
            if (process.model, process.version) == (name, version):
                del self.processes[process.name]
                yield Kill(process.name)

    # Reconciling.

    def _reconcile(self, now: float) -> Iterator[Action]:
        yield from self._pass_unprobed(now)
        for key, _ in self._desired_counts():
            yield from self._promote(key, now)
        yield from self._switch()
        for key, count in self._desired_counts():
            yield from self._drain_surplus(key, count, now)
        yield from self._drain_undesired(now)
        yield from self._start_missing(now)
        self._forget_versions()
        yield from self._announce()
        yield from self._probes(now)
        yield from self._finish()

    def _desired_counts(self) -> Iterator[tuple[StageKey, int]]:
        yield ("", "", 0), self.desired.gateways
        for name, model in self.desired.models.items():
            for version in {self.active[name], model.version}:
                known = self._versions.get((name, version))
                for stage, count in enumerate(known.replicas if known else ()):
                    yield (name, version, stage), count

    def _spares(self, key: StageKey) -> int:
        known = self._versions.get(key[:2])
        return 0 if known is None else known.spares_of(key[2])

    def _processes_of(self, key: StageKey) -> list[Process]:
        return [p for p in self.processes.values() if _key_of(p) == key]

    def _drain_surplus(self, key: StageKey, count: int, now: float) -> Iterator[Action]:
        staying = [p for p in self._processes_of(key) if not p.is_going]
        kept = [p for p in staying if not p.is_drain_requested]
        if sum(p.phase is ProcessPhase.READY for p in kept) >= count:
            for process in staying:
                if process.is_drain_requested:  # its replacement is ready
                    yield from self._drain(process, now)
        ready = [p for p in kept if p.phase is ProcessPhase.READY]
        # Surplus ready replicas, drained even if spares are missing.
        excess = len(ready) - count
        surplus = max(len(kept) - count - self._spares(key), excess, 0)
        newest_ready = sorted(ready, key=lambda p: -_number(p.name))[: max(0, excess)]
        others = sorted(
            (p for p in kept if p not in newest_ready),
            key=lambda p: (PREFERRED.index(p.phase), -_number(p.name)),
        )
        for process in [*newest_ready, *others][:surplus]:
            yield from self._drain(process, now)

    def _start_missing(self, now: float) -> Iterator[Action]:
        shortages = []
        for key, active_count in self._desired_counts():
            count = active_count + self._spares(key)
            kept = [
                p
                for p in self._processes_of(key)
                if not p.is_going and not p.is_drain_requested
            ]
            missing = max(0, count - len(kept))
            lost = self._lost[key] = min(self._lost.get(key, 0), missing)
            if not missing and all(p.phase is not ProcessPhase.LAUNCHING for p in kept):
                self.unplaced.pop(key, None)
            not_before = max(
                self.backoff.of(key).not_before, self._retry_at.get(key, 0.0)
            )
            if missing and now >= not_before:
                shortages.append(Shortage(key, count, missing, lost))
        starting = [
            p
            for p in self.processes.values()
            if p.phase in (ProcessPhase.LAUNCHING, ProcessPhase.JOINED)
            and not p.is_gateway
        ]
        chosen = next_starts(shortages, self.starts_at_once - len(starting))
        # A start that takes longer than ``SLOW_START_S`` may hang, so urgent starts
        # must not wait for it.
        fast = sum(now - p.since <= SLOW_START_S for p in starting)
        fast += sum(bool(key[0]) for key in chosen)
        every = len(starting) + sum(bool(key[0]) for key in chosen)
        # But starts may also be slow because many run at once, so allow at most twice
        # ``starts_at_once``.
        limit = self.starts_at_once
        room = min(every - fast, limit - fast, 2 * limit - every)
        chosen += urgent_starts(shortages, chosen, max(0, room))
        self._updates_wait({s.key for s in shortages} - set(chosen), now)
        for key in chosen:
            yield self._launch(key, now)

    def ready_at(self, model: str, stage: int) -> list[str]:
        """Return a stage's ready replicas of any version; raise ServeError if none."""
        names = [
            p.name
            for p in self.processes.values()
            if (p.model, p.stage, p.phase) == (model, stage, ProcessPhase.READY)
        ]
        if not names:
            raise ServeError(
                f"stage {stage} of {model!r} has no ready replica; wait for one"
            )
        return names

    def _launch(self, key: StageKey, now: float) -> Launch:
        model, version, stage = key
        prefix = f"{model}/{stage}" if model else "gateway"
        name = f"{prefix}/{self.next_number}"
        self.next_number += 1
        self._lost[key] = max(0, self._lost.get(key, 0) - 1)
        process = Process(name, model, version, stage, since=now)
        process.entered[ProcessPhase.LAUNCHING] = now
        if process.is_gateway:
            process.options = self.desired.gateway_options
        self.processes[name] = process
        return Launch(name, model, version, stage)

    def _drain(self, process: Process, now: float) -> Iterator[Action]:
        if process.phase is ProcessPhase.LAUNCHING:
            del self.processes[process.name]
            # A launching process has no work, so it need not drain.
            yield Kill(process.name)
            return
        process.phase, process.since = ProcessPhase.DRAINING, now
        process.drain_number = self.table.number + 1
        yield LogEvent("drain", f"{process.name} gets no new work", process.name)

    def _switch(self) -> Iterator[Action]:
        for name, model in self.desired.models.items():
            old = self.active[name]
            if old == model.version:
                continue
            if all(
                sum(
                    p.phase is ProcessPhase.READY
                    for p in self._processes_of((name, model.version, s))
                )
                >= max(1, count)  # even at zero replicas, a probe must have passed
                for s, count in enumerate(model.replicas)
            ):
                self.active[name] = model.version
                self._updates.pop(name, None)
                text = f"{name}: version {model.version} is active, {old} drains"
                yield LogEvent("updated", text)

    def _drain_undesired(self, now: float) -> Iterator[Action]:
        keys = {key for key, _ in self._desired_counts()}
        for process in list(self.processes.values()):
            if _key_of(process) not in keys and not process.is_going:
                yield from self._drain(process, now)

    def _identified(self, process: Process, fingerprint: str) -> Iterator[Action]:
        """Record a replica's hardware fingerprint; log it if other replicas' differ."""
        process.fingerprint = fingerprint
        others = {
            p.fingerprint
            for p in self.processes.values()
            if (p.model, p.version) == (process.model, process.version)
        }
        if len(others - {""}) > 1:
            text = (
                f"{process.name} runs on {fingerprint}; other replicas of the model do "
                "not, so a stream that moves between them may get different tokens"
            )
            yield LogEvent("fingerprint", text, process.name)

    def _forget_versions(self) -> None:
        needed = {key[:2] for key, _ in self._desired_counts()}
        running = {(p.model, p.version) for p in self.processes.values()}
        for version in self._versions.keys() - needed - running:
            del self._versions[version]
        for key in [key for key in self.unplaced if key[:2] not in needed]:
            del self.unplaced[key]
        for known in (self.start_s, self._lost):
            for key in [key for key in known if key[:2] not in needed]:
                del known[key]

    def _announce(self) -> Iterator[Action]:
        table = routing_table_of(
            self.table.number,
            self.processes.values(),
            self.desired,
            self.active,
            self._versions,
            self._refused(),
        )
        if table != self.table:
            self.table = replace(table, number=self.table.number + 1)
            yield Announce(self.table)

    def _refused(self) -> set[tuple[str, str]]:
        """Return the active versions whose changed files keep a stage from starting."""
        ready = {_key_of(p) for p in self.processes.values() if not p.is_starting}
        keys = (
            (name, version, stage)
            for name, version in self.active.items()
            if (name, version) in self._versions
            for stage in range(len(self._versions[name, version].replicas))
        )
        return {
            key[:2]
            for key in keys
            if key not in ready and CHANGED in self.backoff.of(key).cause
        }

    def _gateways(self) -> list[Process]:
        return [p for p in self.processes.values() if p.is_gateway]

    def _probes(self, now: float) -> Iterator[Action]:
        gateways = self._probers()
        if not gateways:
            return
        for process in self.processes.values():
            probe = process.probe
            limit_s = self._probe_s(process)
            is_asked = probe.gateway and now - probe.asked_at < limit_s + PROBE_GRACE_S
            if (
                process.phase is not ProcessPhase.LOADED
                or is_asked
                or now < probe.not_before
                or not self._is_complete(process.model, process.version)
            ):
                continue
            turn = _number(process.name) + probe.failures
            probe.gateway, probe.asked_at = gateways[turn % len(gateways)], now
            yield Probe(process.name, probe.gateway, limit_s)

    def _probers(self) -> list[str]:
        return [
            p.name
            for p in self._gateways()
            if p.phase is ProcessPhase.READY and p.is_joined
        ]

    def _probe_s(self, process: Process) -> float:
        """Return a probe's time limit: doubled by each failure, up to the deadline."""
        known = self._versions.get((process.model, process.version))
        longest_s = max(PROBE_S, known.deadline_s if known else 0.0)
        return min(longest_s, PROBE_S * 2.0**process.probe.failures)

    def _pass_unprobed(self, now: float) -> Iterator[Action]:
        """Mark replicas as ready without a probe if another stage is scaled to zero."""
        for process in list(self.processes.values()):
            key = process.model, process.version
            known = self._versions.get(key)
            if (
                known is not None
                and process.phase is ProcessPhase.LOADED
                and any(
                    not count and not self._is_loaded((*key, stage))
                    for stage, count in enumerate(known.replicas)
                )
                and self._is_complete(*key)
            ):
                yield from self._probed(process.name, None, now)

    def _is_complete(self, model: str, version: str) -> bool:
        """Return whether all stages that should have a loaded replica have one."""
        key = model, version
        known = self._versions.get(key)
        return known is None or all(
            not count or self._is_loaded((*key, stage))
            for stage, count in enumerate(known.replicas)
        )

    def _is_loaded(self, key: StageKey) -> bool:
        return any(p.phase in LOADED_PHASES for p in self._processes_of(key))

    def _finish(self) -> Iterator[Action]:
        """Finish draining processes that receive no more work, earlier stages first."""
        for process in self.processes.values():
            if process.phase is not ProcessPhase.DRAINING:
                continue
            if process.is_gateway:
                process.phase = ProcessPhase.FINISHING
                yield Finish(process.name)
                continue
            senders = self._gateways()
            senders += self._processes_of(
                (process.model, process.version, process.stage - 1)
            )
            # Do not wait for a sender that has not joined yet: it gets the latest table
            # when it joins.
            has_every_sender_applied = all(
                s.applied >= process.drain_number for s in senders if s.is_there
            )
            # If a whole stage drains, draining processes of earlier stages still send
            # it their work, so wait for them. Processes of earlier stages that stay
            # return work that they cannot send, so do not wait for those.
            is_last_of_stage = not any(
                not p.is_going for p in self._processes_of(_key_of(process))
            )
            before = [
                p
                for p in self.processes.values()
                if (p.model, p.version) == (process.model, process.version)
                and p.stage < process.stage
                and p.is_going
            ]
            if has_every_sender_applied and not (is_last_of_stage and before):
                process.phase = ProcessPhase.FINISHING
                yield Finish(process.name)


LOADED_PHASES = (
    ProcessPhase.LOADED,
    ProcessPhase.SPARE,
    ProcessPhase.READY,
    ProcessPhase.DRAINING,
)

# Phases of replicas in the order in which surplus ones are drained.
PREFERRED = (
    ProcessPhase.LAUNCHING,
    ProcessPhase.JOINED,
    ProcessPhase.LOADED,
    ProcessPhase.SPARE,
    ProcessPhase.READY,
)

# Seconds until the next attempt to place a replica; a new machine ends the wait.
PLACEMENT_RETRY_S = 1.0
# Seconds before a probe is repeated after its first failure; doubled each time.
PROBE_PAUSE_S = 0.1

# Consecutive failed probes after which a replica is replaced.
PROBE_FAILURES = 5

# Consecutive failures with the same cause after which a stage's first start is
# abandoned.
FIRST_START_FAILURES = 4
# Consecutive crashes of one stage after which a new version is rolled back.
ROLL_BACK_FAILURES = 3


def _key_of(process: Process) -> StageKey:
    return process.model, process.version, process.stage


def _number(name: str) -> int:
    return int(name.rsplit("/", 1)[1])


def _by_phase(process: Process, launched_at: float, now: float) -> str:
    joined_at = process.entered.get(ProcessPhase.JOINED)
    loaded_at = process.entered.get(ProcessPhase.LOADED)
    if joined_at is None or loaded_at is None:
        return ""  # an earlier controller launched it, so its times are unknown
    waited = f"{process.waited_s:.2f} to wait for others, " if process.waited_s else ""
    return (
        f" ({joined_at - launched_at:.2f} s to start, "
        f"{loaded_at - joined_at:.2f} to load, {waited}"
        f"{now - loaded_at - process.waited_s:.2f} to be probed)"
    )
