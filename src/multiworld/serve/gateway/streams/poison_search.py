"""Suspects: streams that replicas may have died of, and how the cause is found. Pure.

Adaptive group testing (Dorfman, "The Detection of Defective Members of Large
Populations", 1943; Hwang's generalized binary splitting, 1972). After the second loss,
the streams of a small crowd are computed one by one. Those of a larger crowd stay
together, and nothing changes for them: most losses have another cause. If the crowd
loses a replica once more, it is split into ``FAN`` groups. One group at a time is
computed, with no other step in flight. What survives is cleared; a group that loses
another replica is split again, and the other groups are released.

``n`` streams need about log8(n) losses more than one stream, and ``FAN`` steps for a
token meanwhile, instead of ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiworld.serve.gateway.streams.stream import Stream, SuspectGroup

# Groups into which a crowd is split. With eight, one poison stream of 64 is found with
# six losses that count: 64, 64, 64, 8, 1, 1. With four it takes seven, with two ten.
FAN = 8
ALONE = 4  # streams of a small crowd, at most


class Suspects:
    """The groups of suspects of one gateway."""

    def __init__(self) -> None:
        self._last = 0
        self._all: dict[int, Stream] = {}

    def accuse(self, streams: Sequence[Stream]) -> None:
        """Group the suspects that a replica may have died of."""
        streams = [stream for stream in streams if not stream.is_single]
        if len(streams) <= ALONE:
            self._regroup([[stream] for stream in streams], is_isolated=True)
            return
        accused: dict[SuspectGroup | None, list[Stream]] = {}
        for stream in streams:
            accused.setdefault(stream.group, []).append(stream)
        self._regroup([accused.pop(None, [])], is_isolated=False)
        for those in accused.values():
            self._regroup([those[n::FAN] for n in range(FAN)], is_isolated=True)

    def _regroup(self, parts: Sequence[Sequence[Stream]], *, is_isolated: bool) -> None:
        split: list[SuspectGroup] = []
        for part in filter(None, parts):
            for stream in part:
                self._release_others(stream)
                self.leave(stream)
            self._last += 1
            members = {stream.number: stream for stream in part}
            group = SuspectGroup(self._last, members, is_isolated, split)
            split.append(group)
            for stream in part:
                stream.group = group
            self._all.update(members)

    def _release_others(self, accused: Stream) -> None:
        """Isolate the other groups no more: the cause is in the accused stream's."""
        if accused.group is not None and accused.group.is_isolated:
            for other in accused.group.split:
                if other is not accused.group:
                    other.is_isolated = False
            accused.group.split.clear()

    def leave(self, stream: Stream) -> None:
        """Forget a stream that has ended, or that has been cleared."""
        if stream.group is not None:
            del stream.group.members[stream.number]
            self._all.pop(stream.number, None)
            stream.group = None

    def kept_from(self, stream: Stream) -> set[str]:
        """Return the replicas that compute a group from which a suspect is isolated."""
        own = stream.group
        if own is None or not own.is_isolated:
            return set()
        return {
            name
            for other in self._all.values()
            if other.group is not own and other.group and other.group.is_isolated
            for name in other.chain
        }
