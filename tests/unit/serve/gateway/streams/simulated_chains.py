"""Simulated text generation: real streams and workers, simulated edges and threads."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from multiworld.errors import ServeError
from multiworld.serve.engine.compute.stage_engine import StageEngine
from multiworld.serve.gateway.streams.actions import Cut, Item
from multiworld.serve.gateway.streams.streams import NOTHING, Streams
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.replica.sequences.engine import Engine
from multiworld.serve.replica.sequences.generation_worker import GenerationWorker
from multiworld.serve.replica.sequences.recovery import ReplicaSettings
from multiworld.serve.spec.stage import Generation, Stage
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    TokenItem,
)
from multiworld.serve.wire.origin import Origin
from multiworld.serve.wire.protocol import MessageError
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
    edges_of,
)
from tests.unit.inner_state import kept_bytes

WORDS = 97
GATEWAY = "gateway/1"
CONTROLLER = "controller"
FACTS = Generation(
    tokenizer=lambda: None,
    end_tokens=(),
    vocabulary=WORDS,
    max_tokens=100,
    kv_bytes=[1],
)


def front(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
    return mixed(rows[:, None].double(), positions, attention)


def middle(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
    return mixed(rows, positions, attention)


def back(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
    chosen = mixed(rows, positions, attention)[wanted, 0].long()
    return torch.nn.functional.one_hot(chosen, WORDS).float()


def only(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
    return back(rows[:, None].double(), positions, attention, wanted)


def mixed(rows: Any, positions: Any, attention: Any) -> Any:
    """Return the sum of all rows so far, each times its position plus one."""
    values = (rows * (positions[:, None] + 1))[None]
    ones = torch.ones_like(values)
    mean = attention.attend(0, ones, ones, values, scale=1e-300)[:, 0]
    return (mean * (positions[:, None] + 1)).round() % WORDS


def reference(stages: int, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the model must generate."""
    tokens = list(prompt)
    for _ in range(count):
        rows = tokens
        for _ in range(stages):
            sums = [v * (place + 1) for place, v in enumerate(rows)]
            rows = [sum(sums[: place + 1]) % WORDS for place in range(len(rows))]
        tokens.append(rows[-1])
    return tokens[len(prompt) :]


class InlineEngine(Engine):
    """Engine that computes at once instead of in a thread."""

    def __init__(self, function: Any, is_last: bool, limits: EngineLimits) -> None:
        stage = Stage(load=lambda _: function)
        super().__init__(stage, is_last, 1, FACTS, None, False, lambda: 0.0)
        self._stage_engine: StageEngine = StageEngine(function, is_last, FACTS)
        self._limits, self.most_blocks, self.steps = limits, 0, 0
        self.rows = 0
        self.compiled: dict[int, Future[None]] = {}

    def open(self, start: SequenceStart) -> Future[None] | None:
        """Begin a sequence; ``compiled`` simulates the compilation of its grammar."""
        sampling = msgspec.structs.replace(start.sampling, grammar="")
        super().open(msgspec.structs.replace(start, sampling=sampling))
        return self.compiled.get(start.key[1])

    async def compute(self, parts: Any, rows: Any, spans: Any = ()) -> Any:
        self.rows += len(rows)
        self.steps += 1
        found = self._run(self._chores(), parts, rows, spans)
        lengths = self._stage_engine.cache.lengths.values()
        blocks = sum(self._limits.blocks_of(length) for length in lengths)
        self.most_blocks = max(blocks, self.most_blocks)
        await asyncio.sleep(0)
        return found

    async def tidy(self) -> None:
        self._stage_engine.tidy(self._chores())

    @property
    def nbytes(self) -> int:
        return self._stage_engine.cache.nbytes


@dataclass
class FakeEdge:
    peer: str


class FakeOutbox:
    def __init__(self, net: Net, here: str, peer: str) -> None:
        self._net, self._here, self.edge = net, here, FakeEdge(peer)
        self.is_up = True

    def put(self, message: Any, contents: Sequence[Any] = ()) -> None:
        copied = [{n: t.clone() for n, t in content.items()} for content in contents]
        if self.is_up:
            queue = self._net.queues.setdefault((self._here, self.edge.peer), deque())
            queue.append((message, copied))

    def flush(self) -> None:
        """Do nothing: ``put`` has sent it."""

    def silent_s(self) -> float:
        return self._net.silent_s(self._here, self.edge.peer)


class Net:
    """Service of one model; each edge keeps its order, the timing is random.

    Attributes:
        queues: Messages in flight, by sender and receiver; a function is called.
        lie: Changes a message of some sender on its way; None: it is lost.
        refused: Messages that their sender was not authorised to send.
        owners: Processes by name.
        may_fail: Whether steps may fail unexpectedly.
        probing: Tasks that probe replacements; None: replacements are ready at once.
    """

    def __init__(
        self,
        chance: random.Random,
        replicas: Sequence[int],
        limits: EngineLimits,
        log_bytes: int = 1 << 20,
        prefix_bytes: int = 0,
        gateways: int = 1,
    ) -> None:
        self.chance, self._limits, self._log_bytes = chance, limits, log_bytes
        self._prefix_bytes = prefix_bytes
        self._stopped: dict[str, float] = {}
        self._resumed: dict[str, float] = {}
        self._postponed: list[Callable[[], None]] = []
        self.stages = len(replicas)
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        self.owners: dict[str, Any] = {}
        self._ends: dict[tuple[str, str], FakeOutbox] = {}
        self._replicas: dict[str, Replica] = {}
        self._engines: dict[str, InlineEngine] = {}
        self._numbers = 0
        self.version, self.weights = "1", "w"
        self.now = 0.0
        self.lie: Callable[[tuple[str, str], Any], Any] = lambda pair, entry: entry
        self.refused: list[Any] = []
        self.may_fail = False
        self.probing: set[asyncio.Task[None]] | None = None
        self.gateways = {
            name: Streams(name, lambda: self.now, chance.random, lambda: 0.0)
            for name in (f"gateway/{n + 1}" for n in range(gateways))
        }
        self.streams = self.gateways[GATEWAY]
        self.owners.update(self.gateways)
        for stage, count in enumerate(replicas):
            for _ in range(count):
                self.start(stage)

    # Processes.

    def start(self, stage: int, state: ReplicaState = ReplicaState.READY) -> str:
        self._numbers += 1
        name = f"r{stage}.{self._numbers}"
        is_last = stage == self.stages - 1
        functions = [front, *[middle] * (self.stages - 2), back]
        if is_last and stage == 0:
            functions = [only]
        settings = ReplicaSettings(
            name=name,
            stage=stage,
            stage_name=f"stage {stage}",
            is_last=is_last,
            log_bytes=self._log_bytes,
            prefix_bytes=self._prefix_bytes,
        )
        engine = InlineEngine(functions[stage], is_last, self._limits)
        scheduler = Scheduler(self._limits)
        self._engines[name] = engine
        self.owners[name] = GenerationWorker(
            settings, engine, scheduler, lambda: self.now
        )
        self._replicas[name] = Replica(
            name,
            "m",
            self.version,
            stage,
            state,
            weights=self.weights,
            stages=self.stages,
        )
        self._table_changed()
        for peer in edges_of(self.table, name):
            self.connect(name, peer)
        return name

    async def probed(self, name: str) -> None:
        """Probe a starting replica until it passes; it is ready afterwards."""
        while name in self.owners:
            try:
                await self.streams.probe(name, (1, 1, 1, 1), 30.0)
            except ServeError:
                continue
            self._or_postpone(lambda: self._is_ready(name))
            return

    def _is_ready(self, name: str) -> None:
        if name in self._replicas:
            ready = replace(self._replicas[name], state=ReplicaState.READY)
            self._replicas[name] = ready
            self._table_changed()

    def _start_replacement(self, stage: int) -> None:
        if self.probing is None:
            self.start(stage)
            return
        name = self.start(stage, ReplicaState.STARTING)
        task = asyncio.ensure_future(self.probed(name))
        self.probing.add(task)
        task.add_done_callback(self.probing.discard)

    def _or_postpone(self, call: Callable[[], None]) -> None:
        """Make a call for the controller, now or when it is no longer stopped."""
        if CONTROLLER in self._stopped:
            self._postponed.append(call)
        else:
            call()

    def drain(self, name: str) -> None:
        old = self._replicas[name]
        self._replicas[name] = replace(old, state=ReplicaState.DRAINING)
        self._table_changed()

    def draining(self) -> list[str]:
        states = self._replicas.items()
        return sorted(n for n, r in states if r.state is ReplicaState.DRAINING)

    def _end_drained(self) -> None:
        for name in self.draining():
            is_told = any(queue for pair, queue in self.queues.items() if name in pair)
            if self.worker(name).is_idle and not is_told and not self._stopped:
                self.kill(name)

    def stop(self, name: str) -> None:
        self._stopped.setdefault(name, self.now)

    def resume(self, name: str) -> None:
        if self._stopped.pop(name, None) is None:
            return
        self._resumed[name] = self.now
        if name == CONTROLLER:
            postponed, self._postponed = self._postponed, []
            for call in postponed:
                call()
            self._table_changed()
        elif name in self.owners:
            self.owners[name].table_changed(self.table)

    def stopped(self) -> list[str]:
        return sorted(self._stopped)

    def silent_s(self, here: str, peer: str) -> float:
        """Return the seconds since ``here`` last heard from ``peer``."""
        since = self._stopped.get(peer)
        if since is None:
            return 0.0
        return self.now - max(since, self._resumed.get(here, 0.0))

    def kill(self, name: str) -> None:
        self.die(name)
        self.forget(name)

    def replace(self, name: str) -> None:
        """Kill a replica; the controller starts another one, once it runs."""
        self.die(name)

        def forget_and_start() -> None:
            self.forget(name)
            self._start_replacement(int(name[1]))

        self._or_postpone(forget_and_start)

    def forget(self, name: str) -> None:
        del self._replicas[name]
        self._table_changed()

    def die(self, name: str) -> None:
        """Kill a replica; it stays in the table, where it may still be chosen."""
        del self.owners[name]
        self._stopped.pop(name, None)
        for here, there in list(self._ends):
            if here == name:
                self._ends.pop((here, there)).is_up = False
                self.queues.pop((there, here), None)
            elif there == name:
                queue = self.queues.setdefault((name, here), deque())
                while queue and self.chance.random() < 0.5:
                    queue.pop()  # it was not sent yet
                queue.append(self._lost(here, name))

    def flap(self, one: str, other: str) -> None:
        self.part(one, other)
        self.connect(one, other)

    def part(self, one: str, other: str) -> None:
        """Break the edge between two replicas."""
        for here, there in ((one, other), (other, one)):
            queue = self.queues.setdefault((there, here), deque())
            queue.clear()
            self._ends[here, there].is_up = False
            queue.append(self._lost(here, there))

    def connect(self, one: str, other: str) -> None:
        """Connect two processes; each notices at its own time."""
        for here, there in ((one, other), (other, one)):
            self.queues.setdefault((there, here), deque()).append(self._up(here, there))

    def _up(self, here: str, there: str) -> Callable[[], None]:
        def up() -> None:
            if here in self.owners and there in self.owners:
                outbox = FakeOutbox(self, here, there)
                self._ends[here, there] = outbox
                self.owners[here].edge_up(outbox)

        return up

    def _lost(self, here: str, there: str) -> Callable[[], None]:
        outbox = self._ends.get((here, there))

        def down() -> None:
            if outbox is not None:
                outbox.is_up = False
            if here in self.owners and outbox is not None:
                self.owners[here].edge_down(outbox, is_polite=False)

        return down

    def _table_changed(self) -> None:
        stages = ((r.version, self.stages) for r in self._replicas.values())
        self.table = RoutingTable(
            number=1,
            gateways=tuple(self.gateways),
            routes={"m": Route(self.version, dict(stages), generates=True)},
            replicas=dict(self._replicas),
        )
        for name, owner in self.owners.items():
            if name not in self._stopped and CONTROLLER not in self._stopped:
                owner.table_changed(self.table)

    def alive(self) -> list[str]:
        return sorted(self._replicas.keys() & self.owners.keys())

    def pairs(self) -> list[tuple[str, str]]:
        return sorted(
            (a, b)
            for a, b in self._ends
            if a < b and not {a, b} & {*self.gateways} and (b, a) in self._ends
            if a in self.owners and b in self.owners
        )

    def worker(self, name: str) -> GenerationWorker:
        found: GenerationWorker = self.owners[name]
        return found

    def engine(self, name: str) -> InlineEngine:
        return self._engines[name]

    # Time.

    async def turn(self) -> bool:
        """Perform one random event; return False if nothing could happen."""
        self.now += 0.01
        self.check()
        if self.chance.random() < 0.1:
            self._tick()
            self._end_drained()
        ready = [
            pair
            for pair, queue in sorted(self.queues.items())
            if queue and pair[1] not in self._stopped
        ]
        workers = [name for name in self.alive() if name not in self._stopped]
        self.chance.shuffle(workers)
        if ready and self.chance.random() < 0.7:
            self._deliver(self.chance.choice(ready))
            return True
        for name in workers:
            if await self._compute(name):
                return True
        if ready:
            self._deliver(self.chance.choice(ready))
            return True
        wakes = [self.worker(name).wakes_at for name in workers]
        self.now = min([self.now + 0.5, *(at + 0.001 for at in wakes if at > self.now)])
        self._tick()
        await asyncio.sleep(0)
        return min(wakes, default=math.inf) < math.inf or any(self.queues.values())

    def _tick(self) -> None:
        for name, owner in self.owners.items():
            if name not in self._stopped:
                owner.tick()

    def check(self) -> None:
        for name in self.alive():
            worker, limits = self.worker(name), self._limits
            report = worker.report()
            assert self.engine(name).most_blocks <= limits.blocks
            assert self.may_fail or not report.counts.get("failed_steps", 0)
            probes = sum(s.start.is_probe for s in worker.recovery.table)
            places = limits.max_num_seqs + probes  # probes need none
            assert report.computing <= places or name[1] != "0"
            assert 0.0 <= report.kv_usage <= 1.0
            assert kept_bytes(worker) <= self._log_bytes + self._prefix_bytes
        route = self.table.routes["m"]
        for streams in self.gateways.values():
            most = 2 * (route.max_queued_requests + 1)  # of several tenants
            assert streams.router.without_token["m"].count <= most

    async def _compute(self, name: str) -> bool:
        computing = asyncio.ensure_future(self.worker(name).compute_next())
        await asyncio.sleep(0)
        if not computing.done() and self.chance.random() < 0.5:
            ready = [p for p, q in sorted(self.queues.items()) if q and p[1] == name]
            if ready:
                self._deliver(self.chance.choice(ready))
        return await computing

    def _deliver(self, pair: tuple[str, str]) -> None:
        here = pair[1]
        entry = self.queues[pair].popleft()
        if callable(entry):
            entry()
            return
        outbox = self._ends.get((here, pair[0]))
        entry = self.lie(pair, entry)
        if here not in self.owners or outbox is None or entry is None:
            return
        try:
            self.owners[here].received(outbox, [entry])
        except MessageError:
            self.refused.append(entry[0])
            self.flap(pair[0], here)

    async def connected(self) -> None:
        """Wait until all edges are up."""
        await self.settle(lambda: not any(self.queues.values()))

    async def settle(self, is_done: Callable[[], bool], turns: int = 20_000) -> None:
        """Perform events until ``is_done`` returns True."""
        idle = 0
        for _ in range(turns):
            if is_done():
                return
            idle = 0 if await self.turn() else idle + 1
            await asyncio.sleep(0)
            assert idle < 200, "nothing moves"
        raise AssertionError("it takes too long")


class Client:
    def __init__(
        self,
        net: Net,
        prompt: Sequence[int],
        count: int,
        session: str = "",
        gateway: str = GATEWAY,
        share: Share = DEFAULT_SHARE,
        deadline_s: float = 1e9,
        grammar: str = "",
        request: str = "",
    ) -> None:
        self.items: list[TokenItem] = []
        self.times: list[float] = []
        self._streams, self._share = net.gateways[gateway], share
        self._session, self._deadline_s = session, deadline_s
        self.prompt, self.count = list(prompt), count
        self._net, self._grammar = net, grammar
        self._origin = Origin(request)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        sampling = Sampling(
            temperature=0.0,
            max_tokens=self.count,
            ignore_eos=True,
            grammar=self._grammar,
        )
        arrived: asyncio.Queue[Item] = asyncio.Queue()
        self._streams.check_room("m", self._share)
        stream = self._streams.open(
            "m",
            self.prompt,
            sampling,
            NOTHING,
            arrived.put_nowait,
            deadline_s=self._deadline_s,
            version=self._streams.router.route("m").version,
            session=self._session,
            share=self._share,
            origin=self._origin,
        )
        failed: BaseException | None = None
        try:
            while not (self.items and self.items[-1].finish):
                item = await arrived.get()
                if isinstance(item, Cut):
                    raise item.error
                if isinstance(item, ServeError):
                    raise item
                self.items.append(item)
                self.times.append(self._net.now)
        except BaseException as error:
            failed = error
            raise
        finally:
            stream.close(failed)

    def check(self) -> None:
        assert [item.index for item in self.items] == list(range(self.count))
        found = [item.token for item in self.items]
        assert found == reference(self._net.stages, self.prompt, self.count)
