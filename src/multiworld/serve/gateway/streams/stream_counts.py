"""Counts of the streams of one gateway, for its metrics. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from multiworld.serve.wire.control_messages import Counted

# Upper bounds of the histograms' buckets, in seconds; the last bucket has no bound.
SHORT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BOUNDS_S = (*SHORT_S, 120.0, 300.0, 600.0)  # streams may take minutes
ENDS = (*(f"{bound:g}" for bound in BOUNDS_S), "+Inf")  # bounds, as in Prometheus


class StreamCounts:
    """Counts of a gateway's streams since its start, defined like vLLM's metrics."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, str]] = Counter()
        self._finished: Counter[tuple[str, str]] = Counter()
        self._buckets: dict[tuple[str, str], list[int]] = {}

    def first(self, model: str, queued_s: float, prefill_s: float) -> None:
        """Count a first token, after seconds in queues and seconds of computing."""
        self._time("queue", model, queued_s)
        self._time("prefill", model, prefill_s)
        self._time("first_token", model, queued_s + prefill_s)

    def between(self, model: str, took_s: float) -> None:
        """Count a further token, ``took_s`` after the previous one."""
        self._time("inter_token", model, took_s)

    def ended(
        self,
        model: str,
        prompt: int,
        made: int,
        took_s: float,  # from the first to the last token of this gateway
        made_here: int,  # number of these tokens; other gateways may have made some
    ) -> None:
        """Count an ended stream."""
        self._sums["completions", model] += 1
        self._sums["prompt_tokens", model] += prompt
        self._sums["generation_tokens", model] += made
        if made_here > 1:
            self._time("output_token", model, took_s / (made_here - 1))
            self._time("decode", model, took_s)

    def finished(self, model: str, reason: str) -> None:
        """Count a finished stream by its ``finish_reason``."""
        self._finished[model, reason] += 1

    def of(self, kind: str) -> dict[str, int]:
        """Return completions, prompt_tokens or generation_tokens, by model."""
        return {model: n for (name, model), n in self._sums.items() if name == kind}

    def _time(self, what: str, model: str, took_s: float) -> None:
        buckets = self._buckets.setdefault((what, model), [0] * len(ENDS))
        buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self._sums[f"{what}_seconds", model] += took_s  # type: ignore[assignment]

    def counted(self) -> Iterator[Counted]:
        for (kind, model), value in self._sums.items():
            yield kind, (model,), value
        for labels, count in self._finished.items():
            yield "finished", labels, count
        for (what, model), buckets in self._buckets.items():
            for end, count in zip(ENDS, buckets, strict=True):
                yield f"{what}_buckets", (model, end), count
