"""Who serves a connection: kills, hangs, late frames, and clients that leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from multiworld.serve.keeper.connection_record import (
    ConnectionRecord,
    State,
    record_of,
)
from multiworld.serve.keeper.frames import (
    Entry,
    FrameError,
    FrameReader,
    Kind,
    Place,
    frame,
)
from multiworld.serve.keeper.keeper import (
    COMPUTES,
    MAX_LOSSES,
    PAUSE_S,
    SLOW_S,
    TICK_S,
    WAIT_S,
    Action,
    Close,
    Counters,
    Give,
    Keeper,
    Kill,
    Refuse,
    Release,
    Say,
    Trim,
)

SILENCE_S = 1.0
MIB = 2**20
NOTHING = Counters(0, 0)


def ready(number: int = 1, keeper: Keeper | None = None) -> Keeper:
    """Return a keeper with a gateway that takes connections."""
    made = keeper or Keeper(SILENCE_S, MIB)
    made.joined(number, 0.0)
    hello = Entry(Kind.HELLO, 0, 1, f"gateway/{number}".encode())
    made.said(number, [hello, Entry(Kind.READY)], 0.0)
    return made


def said(keeper: Keeper, gateway: int, *entries: Entry) -> list[Action]:
    return keeper.said(gateway, entries, 0.0)


REQUEST = (
    Entry(Kind.INPUT, 7, 0, b"POST / HTTP/1.1\r\n\r\n"),
    Entry(Kind.REQUEST, 7, 0, b"drawn"),
)
READ = len(REQUEST[0].payload)


def test_connection_waits_for_a_gateway() -> None:
    keeper = Keeper(SILENCE_S, MIB)
    assert keeper.accepted(7, NOTHING, 0.0) == []
    keeper.joined(1, 0.0)
    assert said(keeper, 1, Entry(Kind.HELLO, 0, 1, b"gateway/1")) == []
    assert said(keeper, 1, Entry(Kind.READY)) == [Give(7, 1)]


def test_connection_is_refused_after_a_while() -> None:
    keeper = Keeper(SILENCE_S, MIB)
    keeper.accepted(7, NOTHING, 0.0)
    assert keeper.ticked(WAIT_S) == []
    assert keeper.ticked(WAIT_S + TICK_S) == [Refuse(7)]
    assert not keeper.records


def test_busy_gateway_gets_less() -> None:
    keeper = ready(2, ready(1))
    assert keeper.accepted(7, NOTHING, 0.0) == [Give(7, 1)]
    said(keeper, 1, *REQUEST)
    assert keeper.accepted(8, NOTHING, 0.0) == [Give(8, 2)]
    assert keeper.accepted(9, NOTHING, 0.0) == [Give(9, 2)]


def test_equal_gateways_take_turns() -> None:
    keeper = ready(2, ready(1))
    for number, gateway in ((7, 1), (8, 2), (9, 1), (10, 2)):
        assert keeper.accepted(number, NOTHING, 0.0) == [Give(number, gateway)]
        said(keeper, gateway, Entry(Kind.CLOSED, number))


def test_closed_connections_do_not_count_as_load() -> None:
    keeper = ready(1)
    for number, entries in ((7, ()), (8, (Entry(Kind.INPUT, 8, 0, b"?"),))):
        keeper.accepted(number, NOTHING, 0.0)
        assert said(keeper, 1, *entries, Entry(Kind.CLOSED, number)) == [Close(number)]
    assert (keeper.gateways[1].busy, keeper.size) == (0, 0)


def test_stream_of_a_killed_gateway_continues_elsewhere() -> None:
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    ready(2, keeper)
    item, output = Entry(Kind.ITEM, 7, 0, b"token"), Entry(Kind.OUTPUT, 7, 1, b"12345")
    said(keeper, 1, *REQUEST, item, output)
    assert keeper.lost(1, {7: Counters(3, READ)}, 0.0) == [Give(7, 2)]
    record = keeper.records[7]
    assert (bytes(record.output), record.output_at) == (b"45", 3)
    assert (record.items, record.events, record.has_begun) == ([b"token"], 1, True)


def test_half_read_request_is_refused_if_bytes_died_with_the_gateway() -> None:
    """It had no keeper when it read them."""
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, Entry(Kind.INPUT, 7, 0, b"POST"))
    assert keeper.lost(1, {7: Counters(0, 6)}, 0.0) == [Refuse(7)]


@pytest.mark.parametrize("read", [0, 3, 4])
def test_half_read_request_continues(read: int) -> None:
    """What is recorded and not taken out of the kernel is there once more."""
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, Entry(Kind.INPUT, 7, 0, b"POST"))
    assert keeper.lost(1, {7: Counters(0, read)}, 0.0) == [Give(7, 2)]


def test_answer_of_which_more_went_out_than_is_recorded_is_cut() -> None:
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST, Entry(Kind.OUTPUT, 7, 1, b"12"))
    assert keeper.lost(1, {7: Counters(3, READ)}, 0.0) == [Close(7)]


def test_output_of_a_slow_client_is_forgotten_once_it_has_it() -> None:
    """No further entry of the connection says so."""
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    data = b"x" * 100_000
    said(keeper, 1, *REQUEST, Entry(Kind.OUTPUT, 7, 0, data))
    assert said(keeper, 1, Entry(Kind.IDLE, 7)) == [Trim(7)]
    keeper.trimmed(7, 10_000)  # the client reads slowly
    assert keeper.size == 90_000
    now = SLOW_S + TICK_S
    assert Trim(7) in keeper.ticked(now)
    keeper.trimmed(7, len(data))
    assert keeper.size == 0
    assert keeper.ticked(2 * now) == []


def test_memory_is_bounded_by_giving_up_output_too() -> None:
    keeper = ready(2, ready(1))
    for number in range(7, 12):
        keeper.accepted(number, NOTHING, 0.0)
    for number in sorted(keeper.records):
        gateway = 1 if number in keeper.gateways[1].connections else 2
        request = [Entry(e.kind, number, e.value, e.payload) for e in REQUEST]
        said(keeper, gateway, *request, Entry(Kind.OUTPUT, number, 0, b"x" * MIB))
        assert keeper.size <= MIB
    assert keeper.unprotected == 5


def test_connection_whose_missing_output_is_not_kept_is_cut() -> None:
    """Its client has not got all of an answer that nobody has any more."""
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST, Entry(Kind.WRITTEN, 7, 500))
    assert keeper.unprotected == 0
    said(keeper, 1, Entry(Kind.IDLE, 7))
    assert keeper.lost(1, {7: Counters(400, READ)}, 0.0) == [Close(7)]


def test_connection_continues_once_its_client_has_what_is_not_kept() -> None:
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST, Entry(Kind.WRITTEN, 7, 500), Entry(Kind.IDLE, 7))
    assert keeper.lost(1, {7: Counters(500, READ)}, 0.0) == [Give(7, 2)]


def test_heir_knows_what_went_out_before_the_answer() -> None:
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, REQUEST[0], Entry(Kind.INTERIM, 7, 0, b"100"))
    assert keeper.lost(1, {7: Counters(3, READ)}, 0.0) == [Give(7, 2)]
    assert keeper.records[7].has_interim
    said(keeper, 2, Entry(Kind.OUTPUT, 7, 0, b"answer"), Entry(Kind.IDLE, 7))
    assert not keeper.records[7].has_interim


def test_hung_gateway_is_killed_before_another_one_writes() -> None:
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST)
    now = 0.0
    killed: list[Action] = []
    while now < SILENCE_S + 2 * TICK_S:
        now += TICK_S
        keeper.said(2, [Entry(Kind.BEAT)], now)
        killed += keeper.ticked(now)
    assert killed == [Kill(1)]
    assert keeper.lost(1, {7: Counters(0, READ)}, now) == [Give(7, 2)]


def test_pause_of_the_keeper_kills_nobody() -> None:
    keeper = ready(1)
    keeper.ticked(0.1)
    assert keeper.ticked(PAUSE_S + 60.0) == []


def test_gateway_that_leaves_hears_whether_there_is_another() -> None:
    keeper = ready(2, ready(1))
    (first,) = said(keeper, 1, Entry(Kind.LEAVING))
    (last,) = said(keeper, 2, Entry(Kind.LEAVING))
    assert isinstance(first, Say)
    assert isinstance(last, Say)
    assert (first.entry[9], last.entry[9]) == (1, 0)
    assert keeper.accepted(7, NOTHING, 0.0) == [Refuse(7)], "the service shuts down"


def test_connections_wait_for_the_next_service() -> None:
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    keeper.ending(100.0, 0.0)
    (answer,) = said(keeper, 1, Entry(Kind.LEAVING))
    assert isinstance(answer, Say)
    assert answer.entry[9] == 1, "it may hand over"
    assert keeper.released(7, NOTHING, 0.0) == []
    assert keeper.accepted(8, NOTHING, 0.0) == []
    keeper.lost(1, {}, 0.0)
    assert keeper.ticked(99.0) == []
    keeper.begun(99.0)
    assert keeper.ticked(99.0 + WAIT_S) == []
    assert ready(2, keeper).gateways[2].connections == {7, 8}


def test_connections_that_no_service_takes_over_are_given_up() -> None:
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST, Entry(Kind.OUTPUT, 7, 1, b"123"))
    keeper.ending(WAIT_S + 1.0, 0.0)
    said(keeper, 1, Entry(Kind.LEAVING))
    keeper.released(7, Counters(3, READ), 0.0)
    keeper.lost(1, {}, 0.0)
    keeper.accepted(8, NOTHING, 0.0)
    assert keeper.ticked(WAIT_S + 0.5) == []
    assert keeper.ticked(WAIT_S + 1.5) == [Close(7), Refuse(8)]


def kept(keeper: Keeper, gateway: int = 1) -> None:
    """Have a gateway keep the stream of connection 7, whose client leaves, as 9."""
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, gateway, *REQUEST, Entry(Kind.KEPT, 7, 0, b"s"))
    item, closed = Entry(Kind.ITEM, 9, 0, b"token"), Entry(Kind.CLOSED, 7)
    assert said(keeper, gateway, Entry(Kind.SPLIT, 7, 9), item, closed) == [Close(7)]


def test_stream_without_a_client_goes_to_another_gateway() -> None:
    keeper = ready(1)
    kept(keeper)
    ready(2, keeper)
    said(keeper, 1, Entry(Kind.ITEM, 9, 0, b"more"))
    assert keeper.lost(1, {9: NOTHING}, 0.0) == [Give(9, 2)]
    record = keeper.records[9]
    assert (record.items, record.stream) == ([b"token", b"more"], b"s")
    assert bytes(record.input) == REQUEST[0].payload
    said(keeper, 2, Entry(Kind.CLOSED, 9))
    assert (keeper.size, keeper.streams) == (0, {})


@pytest.mark.parametrize(
    ("asks", "stream", "place"),
    [
        (1, b"s", Place.HERE),
        (2, b"s", Place.ELSEWHERE),
        (2, b"other", Place.NOWHERE),
    ],
)
def test_kept_stream_is_found(asks: int, stream: bytes, place: Place) -> None:
    keeper = ready(1)
    kept(keeper)
    ready(2, keeper)
    if asks == 2:
        for gateway in (1, 2):
            said(keeper, 3 - gateway, Entry(Kind.BEAT))
    keeper.gateways[3 - asks].busy += 10
    assert keeper.accepted(8, NOTHING, 0.0) == [Give(8, asks)]
    (answer,) = said(keeper, asks, Entry(Kind.FIND, 8, 0, stream))
    assert isinstance(answer, Say)
    ((found,),) = FrameReader().feed(frame([answer.entry]))
    assert (found.connection, found.value) == (8, place)


def test_connection_moves_to_the_gateway_of_a_stream() -> None:
    keeper = ready(1)
    kept(keeper)
    ready(3, ready(2, keeper))
    keeper.gateways[1].busy += 10
    keeper.accepted(8, NOTHING, 0.0)
    assert said(keeper, 2, Entry(Kind.RELEASED, 8, 0, b"s")) == [Release(8, b"s")]
    assert keeper.released(8, NOTHING, 0.0, b"s") == [Give(8, 1)]


def test_client_of_a_kept_stream_goes_where_the_stream_goes() -> None:
    """It was begun here, and is a reader of the stream from then on."""
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST, Entry(Kind.KEPT, 7, 0, b"s"), Entry(Kind.SPLIT, 7, 9))
    ready(3, ready(2, keeper))
    lost = keeper.lost(1, {7: Counters(0, READ), 9: NOTHING}, 0.0)
    assert lost == [Give(9, 2), Give(7, 2)]
    assert keeper.records[7].stream == b"s"
    said(keeper, 2, Entry(Kind.OUTPUT, 7, 1, b"x"), Entry(Kind.IDLE, 7))
    assert (keeper.records[7].stream, keeper.streams) == (b"", {b"s": 9})


def test_spare_gateway_has_connections_only_once_another_one_is_lost() -> None:
    keeper = ready(2, ready(1, Keeper(SILENCE_S, MIB, active=1)))
    for number in (7, 8):
        assert keeper.accepted(number, NOTHING, 0.0) == [Give(number, 1)]
    found = keeper.lost(1, {7: NOTHING, 8: NOTHING}, 0.0)
    assert found == [Give(7, 2), Give(8, 2)]


def test_request_that_is_at_hand_when_gateways_die_is_refused() -> None:
    """It may be the cause; the others of its gateways are not to blame."""
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    keeper.accepted(8, NOTHING, 0.0)
    said(keeper, 1, *REQUEST)
    for number in range(1, MAX_LOSSES + 1):
        said(keeper, number, Entry(Kind.TAKEN, 7))
        said(keeper, number, Entry(Kind.INPUT, 8), Entry(Kind.OUTPUT, 8, 1, b"x"))
        ready(number + 1, keeper)
        counters = {7: Counters(0, READ), 8: Counters(number, 0)}
        found = keeper.lost(number, counters, 0.0)
        assert Give(8, number + 1) in found
        assert (Refuse(7) in found) == (number == MAX_LOSSES)


def test_gateway_that_computes_may_be_silent_for_longer() -> None:
    keeper = ready(2, ready(1))
    late = 2 * SILENCE_S
    keeper.said(2, [Entry(Kind.BEAT)], late)
    assert keeper.ticked(late, lambda number: True) == []
    assert keeper.ticked(late, lambda number: False) == [], "one look may be chance"
    assert keeper.ticked(late, lambda number: True) == []
    assert keeper.ticked(late, lambda number: False) == []
    assert keeper.ticked(late, lambda number: False) == [Kill(1)]
    assert keeper.counts.hung == 1
    keeper = ready(1)
    assert keeper.ticked(COMPUTES * SILENCE_S + 0.1, lambda number: True) == [Kill(1)]


def test_gateways_that_die_before_they_read_a_request_are_not_counted() -> None:
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, *REQUEST)
    for number in range(1, 4 * MAX_LOSSES):
        ready(number + 1, keeper)
        found = keeper.lost(number, {7: Counters(0, READ)}, 0.0)
        assert found == [Give(7, number + 1)]


def test_stream_beyond_the_memory_is_not_protected_and_not_refused() -> None:
    keeper = Keeper(SILENCE_S, 100)
    ready(2, ready(1, keeper))
    keeper.accepted(7, NOTHING, 0.0)
    said(keeper, 1, Entry(Kind.INPUT, 7, 0, b"x" * 200))
    assert (keeper.unprotected, keeper.size) == (1, 0)
    assert keeper.lost(1, {7: Counters(0, 200)}, 0.0) == [Refuse(7)]


def test_streams_without_clients_leave_half_of_the_memory_to_others() -> None:
    keeper = ready(1, Keeper(SILENCE_S, 1000))
    for number in range(20):
        keeper.accepted(number, NOTHING, 0.0)
        entries = (
            Entry(Kind.INPUT, number, 0, b"x" * 100),
            Entry(Kind.REQUEST, number, 0, b"drawn"),
            Entry(Kind.KEPT, number, 0, b"stream %d" % number),
            Entry(Kind.SPLIT, number, 100 + number),
            Entry(Kind.OUTPUT, number, 0, b"1"),
            Entry(Kind.IDLE, number),
            Entry(Kind.CLOSED, number),
        )
        said(keeper, 1, *entries)
        assert keeper.size <= 600
    keeper.accepted(99, NOTHING, 0.0)
    said(keeper, 1, Entry(Kind.INPUT, 99, 0, b"x" * 300))
    assert keeper.records[99].is_protected
    kept = [n for n in range(100, 120) if keeper.records[n].is_protected]
    assert kept == [100, 101, 102, 103]


def test_connection_is_protected_again_after_a_large_request() -> None:
    keeper = Keeper(SILENCE_S, 100)
    ready(2, ready(1, keeper))
    keeper.accepted(7, NOTHING, 0.0)
    large = Entry(Kind.INPUT, 7, 0, b"x" * 200)
    output, answered = Entry(Kind.OUTPUT, 7, 0, b"1"), Entry(Kind.ANSWERED, 7)
    said(keeper, 1, large, output, answered, Entry(Kind.IDLE, 7))
    keeper.trimmed(7, 1)
    assert keeper.lost(1, {7: Counters(1, 200)}, 0.0) == [Give(7, 2)]


def test_impossible_statement_is_refused() -> None:
    keeper = ready(1)
    keeper.accepted(7, NOTHING, 0.0)
    with pytest.raises(FrameError):
        said(keeper, 1, Entry(Kind.ANSWERED, 7))


def test_gateway_decides_about_its_own_connections_only() -> None:
    keeper = ready(2, ready(1))
    keeper.accepted(7, NOTHING, 0.0)
    assert said(keeper, 2, Entry(Kind.CLOSED, 7)) == []
    assert 7 in keeper.records


@given(
    st.builds(
        ConnectionRecord,
        st.integers(1, 2**64 - 1),
        *[st.integers(0, 2**40)] * 2,
        st.binary(max_size=9).map(bytearray),
        st.integers(0, 2**40),
        st.integers(0, 2**63),
        st.integers(0, 3),
        st.booleans(),
        st.binary(max_size=9),
        st.lists(st.binary(max_size=9), max_size=3),
        st.integers(0, 9),
        st.integers(0, 9),
        st.booleans(),
        st.booleans(),
        st.binary(max_size=9).map(bytearray),
        st.integers(0, 2**40),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.binary(max_size=9),
        state=st.sampled_from(State),
    )
)
def test_record_is_the_same_at_the_other_end(record: ConnectionRecord) -> None:
    record.item_bytes = sum(map(len, record.items))
    (entries,) = FrameReader().feed(frame(record.entries()))
    found = record_of(entries)
    for name in ConnectionRecord.__slots__:
        assert getattr(found, name) == getattr(record, name), name


@dataclass
class Client:
    """A connection as its client and the kernel have it.

    A client sends requests one after the other, of one byte each, and gets three events
    for each. ``read`` of them were taken out of the kernel; ``out`` came to the client.
    """

    number: int
    sent: int = 0
    read: int = 0
    losses: int = 0  # of gateways with its request, and nothing of an answer between
    has_left: bool = False
    out: bytearray = field(default_factory=bytearray)

    @property
    def counters(self) -> Counters:
        return Counters(len(self.out), self.read)


@dataclass
class Server:
    """What a gateway does for a connection: three events for each request."""

    client: Client
    gateway: int
    answered: int  # requests
    shown: int  # events of the current answer
    unread: bytearray  # bytes that wait for the client
    is_reading: bool
    is_taken: bool = True  # the keeper knows that the gateway reads the request


EVENTS = 3


class Host(RuleBasedStateMachine):
    """A keeper, gateways that die at any moment, and clients that compare bytes."""

    @initialize()
    def start(self) -> None:
        self.keeper = Keeper(SILENCE_S, MIB, active=2)
        self.clients: dict[int, Client] = {}
        self.servers: dict[int, Server] = {}
        self.alive: set[int] = set()
        self.number = 0
        self.now = 0.0

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Give(connection, gateway):
                    assert gateway in self.alive
                    assert connection not in self.servers, "two would write"
                    self._take(connection, gateway)
                case Trim(connection):
                    written = len(self.clients[connection].out)
                    self.keeper.trimmed(connection, written)
                case Refuse(connection) | Close(connection):
                    client = self.clients.pop(connection)
                    assert client.has_left or client.losses >= MAX_LOSSES
                case _:
                    pass

    def _take(self, connection: int, gateway: int) -> None:
        client, record = self.clients[connection], self.keeper.records[connection]
        server = Server(client, gateway, 0, 0, bytearray(record.output), False)
        if record.input:
            server.is_reading = True
            server.answered = record.answered
            server.shown = record.events
            server.is_taken = False
        client.read = record.input_at + len(record.input)  # it takes what is recorded
        self.servers[connection] = server
        if gateway % 2:  # others are slow
            self._say(server)

    def _say(self, server: Server, *entries: Entry) -> None:
        if not server.is_taken:
            server.is_taken = True
            entries = (Entry(Kind.TAKEN, server.client.number), *entries)
        self._do(self.keeper.said(server.gateway, entries, self.now))

    @rule()
    def a_gateway_starts(self) -> None:
        if len(self.alive) < 3:
            self.number += 1
            self.alive.add(self.number)
            self.keeper.joined(self.number, self.now)
            self._do(self.keeper.said(self.number, [Entry(Kind.READY)], self.now))

    @rule()
    def a_client_connects(self) -> None:
        self.number += 1
        self.clients[self.number] = Client(self.number)
        self._do(self.keeper.accepted(self.number, NOTHING, self.now))

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), dies=st.sampled_from(["", "sent", "recorded", "read"]))
    def a_request_is_read(self, data: st.DataObject, dies: str) -> None:
        server = self._some(data)
        if server.is_reading:
            return
        client, gateway = server.client, server.gateway
        if client.read == client.sent:
            client.sent += 1
        if dies == "sent":
            self._kill(gateway)
            return
        server.is_reading, server.answered, server.shown = True, 0, 0
        number = client.number
        self._say(server, Entry(Kind.INPUT, number, 0, b"?"))
        if dies != "recorded":
            client.read += 1
            self._say(server, Entry(Kind.REQUEST, number, 0, b"drawn"))
        if dies:
            self._kill(gateway)

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), dies=st.sampled_from(["", "before", "after"]))
    def a_client_leaves(self, data: st.DataObject, dies: str) -> None:
        """Its gateway says so, if it lives."""
        server = self._some(data)
        number, gateway = server.client.number, server.gateway
        server.client.has_left = True
        if dies == "before":
            self._kill(gateway)
            return
        del self.servers[number]
        self._do(self.keeper.said(gateway, [Entry(Kind.CLOSED, number)], self.now))
        assert number not in self.keeper.records
        if dies:
            self._kill(gateway)

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), dies=st.sampled_from(["", "recorded", "written"]))
    def an_event_goes_out(self, data: st.DataObject, dies: str) -> None:
        server = self._some(data)
        if not server.is_reading:
            return
        number, gateway = server.client.number, server.gateway
        server.client.losses = 0
        server.shown += 1
        event = b"%d" % server.shown
        entries = [
            Entry(Kind.ITEM, number, 0, event),
            Entry(Kind.OUTPUT, number, server.shown, event),
        ]
        if server.shown == EVENTS:
            entries += [Entry(Kind.ANSWERED, number), Entry(Kind.IDLE, number)]
            server.is_reading = False
        self._say(server, *entries)
        if dies != "recorded":
            server.unread += event
        if dies:
            self._kill(gateway)

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), count=st.integers(1, 4))
    def the_kernel_takes_bytes(self, data: st.DataObject, count: int) -> None:
        server = self._some(data)
        server.client.out += server.unread[:count]
        del server.unread[:count]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_gateway_dies(self, data: st.DataObject) -> None:
        self._kill(data.draw(st.sampled_from(sorted(self.alive))))

    def _some(self, data: st.DataObject) -> Server:
        return self.servers[data.draw(st.sampled_from(sorted(self.servers)))]

    def _kill(self, gateway: int) -> None:
        self.alive.discard(gateway)
        gone = [n for n, s in self.servers.items() if s.gateway == gateway]
        for number in gone:
            server = self.servers.pop(number)
            server.client.losses += server.is_reading and server.is_taken
        counters = {number: self.clients[number].counters for number in gone}
        self._do(self.keeper.lost(gateway, counters, self.now))

    @invariant()
    def every_byte_comes_once(self) -> None:
        for client in getattr(self, "clients", {}).values():
            whole = b"123" * client.sent
            assert whole.startswith(bytes(client.out))
            server = self.servers.get(client.number)
            if server is not None:
                assert whole.startswith(bytes(client.out + server.unread))

    @invariant()
    def sizes_are_counted(self) -> None:
        if hasattr(self, "keeper"):
            records = self.keeper.records.values()
            assert self.keeper.size == sum(record.size for record in records)
            for gateway in self.keeper.gateways.values():
                busy = [self.keeper.records[n] for n in gateway.connections]
                assert gateway.busy == sum(r.state is not State.IDLE for r in busy)

    def teardown(self) -> None:
        """Everything that was not lost comes to its end."""
        if not hasattr(self, "keeper"):
            return
        self.a_gateway_starts()
        for server in list(self.servers.values()):
            while server.is_reading:
                server.shown += 1
                event = b"%d" % server.shown
                server.unread += event
                server.is_reading = server.shown < EVENTS
            server.client.out += server.unread
            assert bytes(server.client.out) == b"123" * server.client.read


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
