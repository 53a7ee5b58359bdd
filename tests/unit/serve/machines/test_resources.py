"""Machines, needs and bookings: no overbooking, and refusals with reasons."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.config import MIB
from multiworld.errors import PlacementError, SpecError
from multiworld.serve.controller.fleet.state import DesiredModel, DesiredState
from multiworld.serve.controller.placement.replica_placement import (
    ReplicaBookings,
    asks_of,
)
from multiworld.serve.machines.amounts import (
    Gpu,
    Location,
    Need,
    Node,
    in_words,
    needs_of,
)
from multiworld.serve.machines.assignment import assign
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.machines.inventory import this_node
from multiworld.serve.machines.usage import memory_above, memory_of, usage_of
from multiworld.serve.spec.loader import parse_spec

GPUS = (Gpu(0, "A100", 80 * MIB), Gpu(1, "A100", 80 * MIB))


def nodes(count: int = 3, cpus: float = 4.0, size: int = 100 * MIB) -> list[Node]:
    return [Node(f"n{number}", cpus, size) for number in range(count)]


def test_booked_resources_are_unavailable_until_released() -> None:
    ledger = Bookings(nodes(1))
    ledger.book("m/0/1", "m/0", Location("n0"), Need(cpus=3, memory_bytes=60 * MIB))
    assert ledger.free("n0").cpus == 1
    assert ledger.free("n0").memory_bytes == 40 * MIB
    with pytest.raises(PlacementError, match="n0: 1 cpus short, 20 MiB short") as error:
        ledger.book("m/0/2", "m/0", Location("n0"), Need(cpus=2, memory_bytes=60 * MIB))
    assert error.value.short == {"n0": "1 cpus short, 20 MiB short"}
    assert list(ledger.bookings) == ["m/0/1"]
    ledger.release("m/0/1")
    ledger.release("m/0/1")
    assert ledger.free("n0").cpus == 4


def test_replicas_of_a_stage_are_spread_by_free_resources() -> None:
    """A lost machine then takes as few of them as possible."""
    ledger = Bookings([Node("small", 2, 50 * MIB), Node("big", 8, 100 * MIB)])
    need = Need(memory_bytes=10 * MIB)
    where = []
    for number in range(3):
        spot = assign(ledger, "m/0", need, {})
        where.append(spot.node)
        ledger.book(f"m/0/{number}", "m/0", spot, need)
    assert where == ["small", "big", "big"]


def test_plan_comes_before_spreading_and_never_before_room() -> None:
    ledger = Bookings(nodes(2))
    need = Need(memory_bytes=60 * MIB)
    plan = {("m/0", "n1"): 2}
    assert assign(ledger, "m/0", need, plan) == Location("n1")
    ledger.book("a", "m/0", Location("n1"), need)
    assert assign(ledger, "m/0", need, plan) == Location("n0"), "n1 is full"


def test_gpu_with_most_left_is_taken_unless_the_spec_names_one() -> None:
    """GPU memory is booked separately from the machine's."""
    ledger = Bookings([Node("g", 4, 100 * MIB, GPUS), Node("c", 4, 100 * MIB)])
    need = Need(gpus=1, gpu_memory_bytes=50 * MIB)
    spots = []
    for number in range(2):
        spots.append(assign(ledger, "m/0", need, {}))
        ledger.book(f"{number}", "m/0", spots[-1], need)
    assert spots == [Location("g", (0,)), Location("g", (1,))]
    with pytest.raises(PlacementError) as error:
        assign(ledger, "m/0", need, {})
    assert error.value.short == {
        "g": "20 MiB of GPU memory short",
        "c": "it has no GPU",
    }
    named = Need(gpus=1, gpu=1, gpu_memory_bytes=30 * MIB)
    assert assign(ledger, "m/1", named, {}) == Location("g", (1,))
    with pytest.raises(PlacementError, match="it has no GPU 7, only 0, 1"):
        assign(ledger, "m/1", Need(gpus=1, gpu=7), {})


def test_pinned_replica_goes_nowhere_else() -> None:
    ledger = Bookings(nodes(3))
    assert assign(ledger, "m", Need(nodes=frozenset({"n2"})), {}) == Location("n2")
    assert assign(ledger, "m", Need(nodes=frozenset({"*2"})), {}) == Location("n2")
    with pytest.raises(PlacementError, match="`nodes:` does not name this machine"):
        assign(ledger, "m", Need(nodes=frozenset({"elsewhere"})), {})


def test_machine_without_cores_takes_nothing() -> None:
    """A cluster's head may have none; it takes not even replicas that book nothing."""
    ledger = Bookings([Node("head", 0, 100 * MIB), *nodes(1)])
    for number in range(3):
        assert assign(ledger, "m", Need(), {}).node == "n0"
        ledger.book(f"{number}", "m", Location("n0"), Need())
    with pytest.raises(PlacementError, match="it has no cores"):
        assign(Bookings([Node("head", 0, 100 * MIB)]), "m", Need(), {})


def test_what_is_not_declared_fits_on_a_full_machine() -> None:
    """Undeclared needs are best effort."""
    ledger = Bookings(nodes(1))
    ledger.book("a", "m", Location("n0"), Need(cpus=4, memory_bytes=100 * MIB))
    assert assign(ledger, "x", Need(), {}) == Location("n0")
    assert "nothing that is booked" in in_words(Need())


def test_all_of_it_is_admitted_or_nothing() -> None:
    """The largest goes first: a small replica must not take its place."""
    places = ReplicaBookings(nodes(2))
    asks = [
        ("small", "stage 0 of a", 2, Need(memory_bytes=30 * MIB)),
        ("large", "stage 0 of b", 1, Need(memory_bytes=100 * MIB)),
    ]
    places.admit(asks)
    assert places.ledger.bookings == {}
    too_many = [("large", "stage 0 of b", 3, Need(memory_bytes=90 * MIB))]
    with pytest.raises(PlacementError, match="stage 0 of b: 2 of 3 replicas") as error:
        places.admit(too_many)
    assert set(error.value.short) == {"n0", "n1"}


def test_policy_that_returns_no_location_places_nothing() -> None:
    places = ReplicaBookings(nodes(1), policy=lambda *given: None)  # type: ignore[arg-type]
    need = Need(memory_bytes=50 * MIB)
    with pytest.raises(PlacementError, match="returned None instead of a Location"):
        places.take("m/0/1", "m/0", need)
    with pytest.raises(PlacementError, match="returned None instead of a Location"):
        places.admit([("m/0", "m", 1, need)])


def test_admission_counts_what_runs_once() -> None:
    places = ReplicaBookings(nodes(1))
    need = Need(memory_bytes=50 * MIB)
    places.ledger.book("m/0/1", "m/0", Location("n0"), need)
    places.admit([("m/0", "m", 2, need)])
    with pytest.raises(PlacementError):
        places.admit([("m/0", "m", 3, need)])


@pytest.mark.parametrize(("other", "moved"), [(60, []), (20, ["m/0/2"])])
def test_replica_moves_only_where_there_is_room(other: int, moved: list[str]) -> None:
    """Otherwise it would be restarted in place after each plan."""
    places = ReplicaBookings(nodes(2))
    need = Need(memory_bytes=50 * MIB)
    for name in ("m/0/1", "m/0/2"):
        places.ledger.book(name, "m/0", Location("n0"), need)
    unplanned = Need(memory_bytes=other * MIB)
    places.ledger.book("idle/0/1", "idle/0", Location("n1"), unplanned)
    places.plan = {("m/0", "n0"): 1, ("m/0", "n1"): 1}
    assert places.moves(["m/0/1", "m/0/2"]) == moved


def test_machine_that_is_gone_keeps_its_bookings_until_they_are_released() -> None:
    """Its replicas are reported lost one by one."""
    places = ReplicaBookings(nodes(2))
    spot, why = places.take("a", "m", Need(cpus=1))
    assert why == "the machine has room, and no replica of this stage"
    assert places.set_nodes(nodes(1)) == ([], ["n1"])
    assert places.set_nodes(nodes(3)) == (["n1", "n2"], [])
    assert places.ledger.bookings["a"].spot == spot


def test_replica_of_several_gpus_takes_them_whole() -> None:
    four = tuple(Gpu(n, "H200", 100 * MIB) for n in range(4))
    ledger = Bookings([Node("g", 4, 100 * MIB, four)])
    small = Need(gpus=1, gpu_memory_bytes=10 * MIB)
    pair = Need(gpus=2, whole_gpus=True)
    ledger.book("s", "small", assign(ledger, "small", small, {}), small)
    spot = assign(ledger, "pair", pair, {})
    assert spot == Location("g", (1, 2)), "GPU 0 is used"
    ledger.book("p", "pair", spot, pair)
    with pytest.raises(PlacementError, match="only 1 of the 2 GPUs needed has room"):
        assign(ledger, "pair", pair, {})
    with pytest.raises(PlacementError, match="no GPU that it may use has room"):
        ledger.book("t", "small", Location("g", (1,)), small)
    spots = [assign(ledger, "small", small, {})]
    ledger.book("t", "small", spots[0], small)
    spots.append(assign(ledger, "small", small, {}))
    assert spots == [Location("g", (3,)), Location("g", (0,))]
    ledger.release("p")
    assert assign(ledger, "pair", pair, {}) == Location("g", (1, 2))


def test_several_gpus_need_the_declared_memory_on_each() -> None:
    ledger = Bookings([Node("g", 4, 100 * MIB, GPUS)])
    ledger.book("a", "a", Location("g", (0,)), Need(gpus=1, gpu_memory_bytes=70 * MIB))
    pair = Need(gpus=2, gpu_memory_bytes=20 * MIB)
    why = r"2 GPUs with 20 MiB each.*1 of the 2 GPUs"
    with pytest.raises(PlacementError, match=why):
        assign(ledger, "pair", pair, {})
    less = Need(gpus=2, gpu_memory_bytes=5 * MIB)
    assert assign(ledger, "pair", less, {}) == Location("g", (0, 1))


ENGINE = """
models:
  chat:
    path: /models/chat
    engine: vllm
    engine_args: {tensor_parallel_size: 2, pipeline_parallel_size: 2}
    device: cuda
"""


def test_engine_takes_as_many_gpus_as_its_arguments_say() -> None:
    """Without ``gpu_memory_mb`` it takes them whole."""
    need = needs_of(parse_spec(ENGINE).models["chat"])[0]
    assert need == Need(gpus=4, whole_gpus=True)
    some = parse_spec(ENGINE + "    gpu_memory_mb: 100\n").models["chat"]
    assert needs_of(some)[0] == Need(gpus=4, gpu_memory_bytes=100 * MIB)
    on_cpu = parse_spec(ENGINE.replace("cuda", "cpu")).models["chat"]
    assert needs_of(on_cpu)[0] == Need()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("device: cuda", "device: cuda:1", "4 GPUs, but .* names only one"),
        ("size: 2,", "size: two,", "tensor_parallel_size must be an integer from 1"),
        ("size: 2,", "size: 0,", "tensor_parallel_size must be an integer from 1"),
        ("size: 2}", "size: true}", "pipeline_parallel_size must be an integer from 1"),
        ("tensor_parallel_", "tensor-parallel-", "with underscores"),
        (
            "size: 2}",
            "size: 2, gpu-memory-utilization: 0.5}\n    gpu_memory_mb: 5",
            "gpu_memory_utilization set the same",
        ),
    ],
)
def test_impossible_number_of_gpus_is_refused(old: str, new: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse_spec(ENGINE.replace(old, new))


SPEC = """
models:
  m:
    factory: tests.serve.models:model
    stages:
    - {name: a, replicas: 2, cpus: 1, memory_mb: 10}
    - {name: b, ranks: 2, memory_mb: 10, nodes: [n0]}
    - {name: c, device: "cuda:1", gpu_memory_mb: 5}
"""


def test_needs_are_as_the_spec_declares_them() -> None:
    """The needs of all ranks of a replica add up."""
    app = parse_spec(SPEC)
    first, second, third = needs_of(app.models["m"])
    assert first == Need(cpus=1.0, memory_bytes=10 * MIB)
    assert second.memory_bytes == 20 * MIB
    assert second.nodes == {"n0"}
    assert (third.gpus, third.gpu, third.gpu_memory_bytes) == (1, 1, 5 * MIB)
    wanted = DesiredState({"m": DesiredModel("1", (2, 1, 1))})
    asks = asks_of(wanted, {"m": {"1": app.models["m"]}})
    assert [ask[:3] for ask in asks] == [
        (("m", "1", 0), "stage a of m (1)", 2),
        (("m", "1", 1), "stage b of m (1)", 1),
        (("m", "1", 2), "stage c of m (1)", 1),
    ]


needs = st.builds(
    Need,
    cpus=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    memory_bytes=st.integers(0, 5).map(lambda n: n * 10 * MIB),
)


@given(st.lists(st.tuples(needs, st.booleans()), max_size=40))
def test_nothing_is_ever_over_committed(steps: list[tuple[Need, bool]]) -> None:
    ledger = Bookings(nodes(3, cpus=4.0, size=100 * MIB))
    for number, (need, leaves) in enumerate(steps):
        if leaves and ledger.bookings:
            ledger.release(next(iter(ledger.bookings)))
        try:
            ledger.book(f"{number}", "m", assign(ledger, "m", need, {}), need)
        except PlacementError:
            short = [ledger.shortage(name, need) for name in ledger.nodes]
            assert all(short), "it was refused, and would have fitted"
        for name in ledger.nodes:
            free = ledger.free(name)
            assert free.cpus >= 0
            assert free.memory_bytes >= 0


def test_declared_limits_of_this_machine_only_reduce() -> None:
    whole = this_node()
    assert 0 < whole.cpus <= (os.cpu_count() or 1)
    assert whole.memory_bytes > 2**28
    part = this_node("here", cpus=0.5, memory_bytes=MIB)
    assert (part.name, part.cpus, part.memory_bytes) == ("here", 0.5, MIB)


GROWS = "import sys; a = bytearray(64 << 20); print('x', flush=True); sys.stdin.read()"


def test_memory_of_a_process_is_its_own() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        used = memory_of(process.pid)
        assert 64 * MIB <= used <= 128 * MIB
        assert memory_above(process.pid, 32 * MIB) == pytest.approx(used, rel=0.1)
        assert memory_above(process.pid, 256 * MIB) is None
        assert usage_of(process.pid).cpu_s > 0
        assert process.stdin is not None
        process.stdin.close()
    assert memory_of(process.pid) == 0
