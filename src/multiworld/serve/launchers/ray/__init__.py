"""Replicas on the machines of a Ray cluster.

Ray starts and ends the replicas and accounts for their resources; they exchange data
over worlds. The driver is a process of its own (``bridge``), because Ray ends a driver
that has lost the head of its cluster, and the controller must survive that.
"""
