"""What machines have, what replicas need and use, and what is still free.

``amounts``, ``ledger``, ``assigning`` and ``admitting`` are pure: a machine, a need and
what is booked go in, a spot or a ``PlacementError`` comes out. ``inventory`` and
``usage`` read the machine.
"""
