"""Traces of requests: generated, or from files of Azure LLM inference traces
(https://github.com/Azure/AzurePublicDataset), of BurstGPT
(https://github.com/HPMLL/BurstGPT), or any CSV whose first column has seconds or
dates."""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from multiworld.errors import ServeError
from multiworld.serve.simulation.pipeline import Arrival

# Titles of columns with the number of prompt tokens.
CONTEXT = ("ContextTokens", "Request tokens", "context_tokens", "input_tokens")
# Titles of columns with the number of output tokens.
GENERATED = ("GeneratedTokens", "Response tokens", "generated_tokens", "output_tokens")

# Time of an output token, as a multiple of the time of a prompt token, because prompt
# tokens are computed together. (Patel et al., "Splitwise", ISCA 2024, figures 5 and 6:
# a prompt of 1,500 tokens takes as long as about 40 to 80 output tokens.)
TOKEN_WEIGHT = 20.0

LONGEST_S = 1e8  # maximum seconds of a trace: three years
# Maximum number of requests of a generated trace, all of which are kept in memory.
MAX_REQUESTS = 10_000_000

# Fractions of a second that a datetime cannot hold.
_FINER = re.compile(r"(\.\d{6})\d+")


def read_trace(path: Path, *, by_tokens: bool = False) -> list[Arrival]:
    """Read a CSV file; ``by_tokens`` derives the work of requests from their tokens."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            found = _read(csv.reader(file), path, by_tokens)
    except OSError as error:
        raise ServeError(f"cannot read trace {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ServeError(f"trace {path} is not a CSV file: {error}") from error
    if not found:
        raise ServeError(f"trace {path} has no requests")
    found = _from_zero(found)
    if found[-1].at > LONGEST_S:
        raise ServeError(f"trace {path} is longer than {LONGEST_S:g} s")
    return found


def _read(rows: Iterable[list[str]], path: Path, by_tokens: bool) -> list[Arrival]:
    found: list[Arrival] = []
    titles: list[str] = []
    for number, row in enumerate(rows, 1):
        if not row or not "".join(row).strip():
            continue
        at = _seconds(row[0])
        if at is None and not titles and not found:
            titles = [title.strip() for title in row]
            continue
        if at is None or not math.isfinite(at):
            raise ServeError(
                f"{path}, line {number}: {row[0][:40]!r} is neither seconds nor a date"
            )
        work = _work(row, titles, path, number) if by_tokens else 1.0
        prompt, answer = _tokens(row, titles)
        model = row[titles.index("Model")] if "Model" in titles[: len(row)] else ""
        found.append(Arrival(at, work, model, prompt, answer))
    if by_tokens and not _columns(titles):
        raise ServeError(f"trace {path} has no token columns; omit --by-tokens")
    return found


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(
            _FINER.sub(r"\1", text.strip().removesuffix(" UTC"))
        )
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _columns(titles: Sequence[str]) -> list[tuple[int, float]]:
    """Return the token columns, and the weight of a token in each."""
    found = [(titles.index(t), 1.0) for t in CONTEXT if t in titles]
    return found + [(titles.index(t), TOKEN_WEIGHT) for t in GENERATED if t in titles]


def _work(row: list[str], titles: list[str], path: Path, number: int) -> float:
    try:
        counts = [(weight, float(row[k])) for k, weight in _columns(titles)]
        if not all(math.isfinite(count) and count >= 0 for _, count in counts):
            raise ValueError
        return sum(weight * count for weight, count in counts)
    except (ValueError, IndexError):
        raise ServeError(
            f"{path}, line {number}: the number of tokens is missing or not a number "
            "of at least 0"
        ) from None


def _tokens(row: list[str], titles: list[str]) -> tuple[int, int]:
    """Return the numbers of prompt and output tokens; 0 where there are none."""
    found = []
    for names in (CONTEXT, GENERATED):
        column = next((titles.index(t) for t in names if t in titles), len(row))
        text = row[column].strip() if column < len(row) else ""
        found.append(_number(text))
    return found[0], found[1]


def _number(text: str) -> int:
    """Return a number of tokens, which pandas may have written as ``1155.0``."""
    try:
        number = float(text)
    except ValueError:
        return 0
    return round(number) if math.isfinite(number) and number > 0 else 0


def _from_zero(found: list[Arrival]) -> list[Arrival]:
    found.sort()
    first = found[0].at
    mean = sum(arrival.work for arrival in found) / len(found) or 1.0
    return [replace(a, at=a.at - first, work=a.work / mean) for a in found]


# Limits of the coefficient of variation: at 0.01, arrivals are almost regular; at 100,
# hours lie between bursts.
MIN_CV, MAX_CV = 0.01, 100.0


def gamma(rate: float, seconds: float, cv: float = 1.0, seed: int = 0) -> list[Arrival]:
    """Return arrivals with gamma-distributed gaps, as AlpaServe (OSDI 2023) does."""
    draw = random.Random(seed)
    # A coefficient of variation of 1 gives a Poisson process; a larger one is burstier.
    shape = 1.0 / (cv * cv)
    found: list[float] = []
    at = 0.0
    while True:
        at += draw.gammavariate(shape, 1.0 / (rate * shape))
        if at >= seconds:
            return [Arrival(at) for at in found]
        found.append(at)


def generated(text: str, seed: int = 0) -> list[Arrival]:
    """Return the trace that ``text`` describes, as for ``multiworld simulate``."""
    found: list[Arrival] = []
    begin = 0.0
    for number, part in enumerate(text.split("+")):
        kind, _, rest = part.partition(":")
        # ``prompt`` and ``answer`` are means of exponential distributions.
        given = {"rate": 0.0, "seconds": 0.0, "cv": 1.0, "prompt": 0.0, "answer": 0.0}
        try:
            for item in rest.split(","):
                name, _, value = item.partition("=")
                given[name.strip()] = float(value)
            if kind not in ("poisson", "gamma") or len(given) > 5:
                raise ValueError
            if not all(map(math.isfinite, given.values())):
                raise ValueError
            if min(given["rate"], given["prompt"], given["answer"]) < 0:
                raise ValueError
            if not 0 < given["seconds"] <= LONGEST_S:
                raise ValueError
            if not MIN_CV <= given["cv"] <= MAX_CV:
                raise ValueError
        except ValueError:
            raise ServeError(
                f"{part!r} is not a trace; write poisson:rate=5,seconds=600 or "
                "gamma:rate=5,seconds=600,cv=4; join several with +"
            ) from None
        if len(found) + given["rate"] * given["seconds"] > MAX_REQUESTS:
            raise ServeError(
                f"{text!r} has more than {MAX_REQUESTS:,} requests; lower the rate"
            )
        cv = 1.0 if kind == "poisson" else given["cv"]
        if given["rate"] > 0:
            part_ = gamma(given["rate"], given["seconds"], cv, seed + number)
            draw = random.Random(seed + number)
            lengths = given["prompt"], given["answer"]
            for arrival in part_:
                prompt, answer = (
                    round(draw.expovariate(1 / n)) if n else 0 for n in lengths
                )
                at = begin + arrival.at
                found.append(Arrival(at, prompt=prompt, answer=answer))
        begin += given["seconds"]
    if not found:
        raise ServeError(f"{text!r} has no requests; raise the rate")
    return found


def stretched(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the same arrivals, ``factor`` times as far apart."""
    return [replace(a, at=a.at * factor) for a in arrivals]


def between(arrivals: Sequence[Arrival], begin: float, end: float) -> list[Arrival]:
    """Return the arrivals in [begin, end) seconds, counted from ``begin``."""
    return [replace(a, at=a.at - begin) for a in arrivals if begin <= a.at < end]
