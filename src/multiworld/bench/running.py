"""Which suites there are, and running one. Shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multiworld.bench import members
from multiworld.bench.members import Body, Options, Step
from multiworld.bench.samples import Report
from multiworld.bench.suites import (
    collectives,
    fan,
    hosts,
    joining,
    many,
    p2p,
    watching,
)

Progress = Callable[[float, str], None]
"""Hears how far a suite is, from 0 to 1, and what it does."""

PORTS = 12


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite.

    Attributes:
        about: For people.
        baseline: Whom ratios are to.
        bodies: What its processes run, and how many of them; one after the other.
    """

    about: str
    baseline: str
    bodies: tuple[tuple[Body, int], ...] = ()


SUITES = {
    "p2p": Suite(
        "streams and round trips, 64 B to 64 MB", p2p.BASELINE, ((p2p.body, 2),)
    ),
    "fan": Suite("one leader and 1 to 8 worlds", fan.BASELINE, ((fan.body, fan.SIZE),)),
    "collectives": Suite(
        "2, 4 and 8 ranks, 4 KB to 16 MB (fewer ranks, larger messages)",
        collectives.BASELINE,
        tuple((collectives.body_of(size), size) for size in (2, 4, 8)),
    ),
    "many": Suite("1 to 1,000 worlds in a process", many.BASELINE, ((many.body, 2),)),
    "joining": Suite(
        "a busy world while others join and break",
        joining.BASELINE,
        ((joining.body, joining.SIZE),),
    ),
    "watching": Suite(
        "fault management on and off", watching.BASELINE, ((watching.body, 2),)
    ),
    "hosts": Suite("TCP between two network namespaces (as root)", hosts.BASELINE),
}


def run_suite(name: str, options: Options, progress: Progress) -> Report:
    """Run a suite.

    Raises:
        RuntimeError: One of its processes failed.
        HostError: It needs network namespaces, and they are not allowed here.
    """
    suite = SUITES[name]
    report = Report(name, suite.baseline)
    share, done = 1.0, 0.0

    def hear(step: Step) -> None:
        kind, what = step
        if kind == "sample":
            report.add(*what)
        elif kind == "note":
            report.notes.append(what)
        else:
            progress(done + share * what[0], what[1])

    if not suite.bodies:
        hosts.run(options, hear)
    share = 1 / max(1, len(suite.bodies))
    for number, (body, size) in enumerate(suite.bodies):
        done = share * number
        given = Options(options.rounds, options.is_quick, members.free_ports(PORTS))
        members.run(body, size, given, hear)
    progress(1.0, "done")
    return report
