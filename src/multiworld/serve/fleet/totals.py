"""Counts of all processes of a service, those that have ended included. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from multiworld.serve.transport.protocol import Counted

Label = tuple[str, tuple[str, ...]]

OF_TENANT = ("tenant_requests", "tenant_seconds", "refused")
"""Kinds of counts whose first label is a tenant."""


REMEMBERED = 64
"""Ended processes whose counts are kept apart, because the last ones come late."""


class Totals:
    """Sums of the counts that processes report.

    A process reports its counts since its start, again and again. What it had counted
    when it ended stays in the sums, so that these never fall. Names are never reused.
    """

    def __init__(self) -> None:
        self._latest: dict[str, dict[Label, float]] = {}
        self._folded: Counter[Label] = Counter()

    def heard(self, name: str, counted: Iterable[Counted]) -> None:
        """Keep the counts of a process; they replace its earlier ones."""
        self._latest[name] = {(kind, labels): value for kind, labels, value in counted}

    def keep_apart(self, names: Container[str]) -> None:
        """Add up the counts of all processes but some, and but those that ended last.

        Args:
            names: Names of the processes that run.
        """
        ended = [name for name in self._latest if name not in names]
        for name in ended[: max(0, len(ended) - REMEMBERED)]:
            for label, value in self._latest.pop(name).items():
                self._folded[label] += value  # type: ignore[assignment]

    def keep_tenants(self, names: Container[str]) -> None:
        """Forget the tenants that no longer exist.

        Args:
            names: Names of the tenants that exist.
        """
        counts: dict[Label, float]
        for counts in (self._folded, *self._latest.values()):  # type: ignore[assignment]
            for label in list(counts):
                kind, labels = label
                if kind in OF_TENANT and labels[0] and labels[0] not in names:
                    del counts[label]

    def sums(self, without: str = "") -> tuple[Counted, ...]:
        """Return the sums over all processes.

        Args:
            without: Name of a process that is left out.
        """
        sums = Counter(self._folded)
        for name, counts in self._latest.items():
            if name != without:
                for label, value in counts.items():
                    sums[label] += value  # type: ignore[assignment]
        return tuple((kind, labels, value) for (kind, labels), value in sums.items())
