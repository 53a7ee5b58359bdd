"""Replicas on the machines of a Ray cluster.

Ray starts, ends and counts them; what they say to each other goes over worlds. The
driver is a process of its own (``bridge``), because Ray ends a driver that has lost the
head of its cluster, and a controller must outlive that.
"""
