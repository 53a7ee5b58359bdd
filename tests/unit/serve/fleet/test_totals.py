"""Totals: sums over processes that come and go never fall, and stay small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.fleet.totals import REMEMBERED, Totals


def summed(totals: Totals, without: str = "") -> dict[tuple[str, ...], float]:
    """Return the sums, by kind and labels."""
    return {(kind, *labels): value for kind, labels, value in totals.sums(without)}


def test_latest_counts_of_all_processes_are_added_up() -> None:
    """A later report of one replaces its earlier ones."""
    totals = Totals()
    totals.heard("a", [("requests", ("m", "200"), 1), ("requests", ("m", "500"), 2)])
    totals.heard("b", [("requests", ("m", "200"), 10)])
    totals.heard("a", [("requests", ("m", "200"), 5), ("requests", ("m", "500"), 2)])
    assert summed(totals) == {
        ("requests", "m", "200"): 15,
        ("requests", "m", "500"): 2,
    }
    assert summed(totals, without="a") == {("requests", "m", "200"): 10}


def test_last_counts_of_a_process_may_come_after_its_end() -> None:
    """Until many others have ended."""
    totals = Totals()
    totals.heard("a", [("rows", (), 1)])
    totals.keep_apart({})
    totals.heard("a", [("rows", (), 3)])
    assert summed(totals) == {("rows",): 3}


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=100, max_size=400)
)
def test_sums_never_fall_and_few_processes_are_remembered(
    steps: list[tuple[int, bool]],
) -> None:
    """Whichever report and end, in whatever order."""
    totals = Totals()
    alive: dict[str, int] = {}
    ended: set[str] = set()
    expected = before = 0.0
    for number, is_end in steps:
        name = str(number)
        if is_end and name in alive:
            del alive[name]
            ended.add(name)
        elif name not in ended:
            alive[name] = alive.get(name, 0) + 1
            expected += 1
            totals.heard(name, [("rows", (), alive[name])])
        totals.keep_apart(alive)
        now = summed(totals).get(("rows",), 0.0)
        assert now == expected >= before
        before = now
        assert len(totals._latest) <= len(alive) + REMEMBERED


def test_tenants_that_do_not_exist_any_more_are_forgotten() -> None:
    """At processes that have ended too; what has no tenant stays."""
    totals = Totals()
    counts = [
        ("tenant_requests", ("acme", "m", "200"), 1.0),
        ("tenant_seconds", ("acme", "m"), 1.0),
        ("refused", ("acme", "rpm_limit"), 1.0),
        ("refused", ("", "no key"), 1.0),
        ("tenant_requests", ("beta", "m", "200"), 1.0),
        ("requests", ("acme", "200"), 1.0),
    ]
    for number in range(REMEMBERED + 1):
        totals.heard(str(number), counts)
    totals.keep_apart({})
    totals.keep_tenants({"beta"})
    assert summed(totals).keys() == {
        ("refused", "", "no key"),
        ("tenant_requests", "beta", "m", "200"),
        ("requests", "acme", "200"),
    }
