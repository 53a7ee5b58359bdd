"""Resources of machines: capacities, needs of replicas, bookings and usage.

``amounts``, ``assignment`` and ``bookings`` are pure.
"""
