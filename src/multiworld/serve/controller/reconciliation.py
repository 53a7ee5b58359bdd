"""The only way to change the fleet: events in, the reconciler's actions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiworld.serve.controller.fleet import actions, events
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import DesiredState


class Reconciliation:
    """Passes events to the reconciler, and its actions to ``carry_out``.

    Events before the start and during the shutdown change nothing.
    """

    def __init__(
        self,
        fleet: Reconciler,
        clock: Callable[[], float],
        carry_out: Callable[[actions.Action], object],
        after: Callable[[events.Event, Sequence[actions.Action]], object],
    ) -> None:
        self._fleet, self._clock = fleet, clock
        self._carry_out, self._after = carry_out, after
        self.is_started = self.is_ending = False

    def want(self, desired: DesiredState) -> None:
        """Set the desired state of the service."""
        self.happened(events.DesiredStateChanged(desired))

    def happened(self, event: events.Event) -> None:
        """Handle an event."""
        if self.is_ending or not self.is_started:
            return
        found = self._fleet.handle(event, self._clock())
        for action in found:
            self._carry_out(action)
        self._after(event, found)
