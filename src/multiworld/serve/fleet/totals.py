"""Counts over all processes of a service, including those that have exited. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from multiworld.serve.transport.protocol import Counted

Label = tuple[str, tuple[str, ...]]

OF_TENANT = ("tenant_requests", "tenant_seconds", "refused")
"""Kinds of counts whose first label is a tenant."""


REMEMBERED = 64
"""Number of exited processes whose counts are kept separately, because their last
report may arrive late."""


class Totals:
    """Sums of the counts that processes report.

    A process repeatedly reports its counts since its start. Its last counts stay in the
    sums after it exits, so the sums never fall. Process names are never reused.
    """

    def __init__(self) -> None:
        self._latest: dict[str, dict[Label, float]] = {}
        self._folded: Counter[Label] = Counter()

    def heard(self, name: str, counted: Iterable[Counted]) -> None:
        self._latest[name] = {(kind, labels): value for kind, labels, value in counted}

    def keep_apart(self, names: Container[str]) -> None:
        """Fold the counts of the earliest exited processes into one sum."""
        ended = [name for name in self._latest if name not in names]
        for name in ended[: max(0, len(ended) - REMEMBERED)]:
            for label, value in self._latest.pop(name).items():
                self._folded[label] += value  # type: ignore[assignment]

    def keep_tenants(self, names: Container[str]) -> None:
        counts: dict[Label, float]
        for counts in (self._folded, *self._latest.values()):  # type: ignore[assignment]
            for label in list(counts):
                kind, labels = label
                if kind in OF_TENANT and labels[0] and labels[0] not in names:
                    del counts[label]

    def sums(self, without: str = "") -> tuple[Counted, ...]:
        sums = Counter(self._folded)
        for name, counts in self._latest.items():
            if name != without:
                for label, value in counts.items():
                    sums[label] += value  # type: ignore[assignment]
        return tuple((kind, labels, value) for (kind, labels), value in sums.items())
