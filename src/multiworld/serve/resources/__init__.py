"""Resources: what machines have, what replicas need, and what is still free.

``amounts``, ``bookings``, ``assignment`` and ``admission`` are pure: a machine, a need
and the bookings go in, a location or a ``PlacementError`` comes out. ``inventory`` and
``usage`` read the machine.
"""
