"""Resources: capacities of machines, needs of replicas, and free resources.

``amounts``, ``bookings``, ``assignment`` and ``admission`` are pure: they turn a
machine, a need and the bookings into a location or a ``PlacementError``. ``inventory``
and ``usage`` read the machine.
"""
