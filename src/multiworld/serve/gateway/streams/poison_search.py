"""Search among suspects for the stream that crashes replicas. Pure.

Adaptive group testing (Dorfman, "The Detection of Defective Members of Large
Populations", 1943; Hwang's generalized binary splitting, 1972). After the second loss,
up to ``ALONE`` suspects are computed one by one. A larger crowd of suspects continues
as before, because most losses have another cause. If the crowd loses another replica,
it is split into ``FAN`` groups. The groups are computed one at a time, with no other
step in flight. A stream that makes progress is cleared; a group that loses another
replica is split again, and the other groups are released.

For ``n`` suspects, the search takes about log8(n) more losses than for one suspect.
During the search, one token for each suspect takes ``FAN`` steps; computing the
suspects one by one would take ``n`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiworld.serve.gateway.streams.stream import Stream, SuspectGroup

# Number of groups into which a crowd is split. With eight groups, finding one poison
# stream among 64 takes six losses that count, which hit 64, 64, 64, 8, 1 and 1 streams.
# With four groups, it takes seven losses; with two groups, ten.
FAN = 8
ALONE = 4  # maximum number of suspects to compute one by one, without groups


class Suspects:
    """The suspects of one gateway, in groups."""

    def __init__(self) -> None:
        self._last = 0
        self._all: dict[int, Stream] = {}

    def accuse(self, streams: Sequence[Stream]) -> None:
        """Group the suspects of the latest loss; each of them may have caused it."""
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
        """Release the other groups of the split: the cause is in the accused one."""
        if accused.group is not None and accused.group.is_isolated:
            for other in accused.group.split:
                if other is not accused.group:
                    other.is_isolated = False
            accused.group.split.clear()

    def leave(self, stream: Stream) -> None:
        """Remove a suspect that has ended or been cleared."""
        if stream.group is not None:
            del stream.group.members[stream.number]
            self._all.pop(stream.number, None)
            stream.group = None

    def kept_from(self, stream: Stream) -> set[str]:
        """Return the replicas of other isolated groups, which a suspect must avoid."""
        own = stream.group
        if own is None or not own.is_isolated:
            return set()
        return {
            name
            for other in self._all.values()
            if other.group is not own and other.group and other.group.is_isolated
            for name in other.chain
        }
