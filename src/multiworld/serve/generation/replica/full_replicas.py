"""Replicas of later stages that had no KV blocks for a sequence. Pure."""

from __future__ import annotations

# Minimum and maximum seconds for which nothing is sent to a replica that had no KV
# blocks for a sequence; the time doubles while it has none.
FULL_S, LONGEST_FULL_S = 0.1, 2.0


class FullReplicas:
    """Replicas that receive nothing for a while; ``names``: those of now."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}

    def add(self, replica: str, now: float) -> None:
        until, pause_s = self._pauses.get(replica, (now, 0.0))
        if now >= until:  # otherwise the message concerns what was sent earlier
            pause_s = min(LONGEST_FULL_S, max(FULL_S, 2 * pause_s))
            self._pauses[replica] = now + pause_s, pause_s
        self.update(now)

    def update(self, now: float) -> None:
        """Forget replicas that have had memory for as long as they were avoided."""
        pauses = self._pauses.items()
        self._pauses = {name: (t, p) for name, (t, p) in pauses if now < t + p}
        self.names = {name for name, (t, _) in self._pauses.items() if now < t}
