"""Replicas on the machines of a Ray cluster. Ray starts them and accounts for their
resources. The driver is a process of its own (``bridge``): Ray kills a driver that
loses the head of its cluster, and the controller must survive that."""
