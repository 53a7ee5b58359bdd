"""Resources: capacities of machines, needs of replicas, and free resources.
``inventory`` and ``usage`` read the machine; the rest is pure."""
