"""Replicas on the machines of a Ray cluster.

Ray starts and stops the replicas and accounts for their resources; they exchange data
over worlds. The driver is a separate process (``bridge``), because Ray kills a driver
that loses the head of its cluster, and the controller must survive that.
"""
