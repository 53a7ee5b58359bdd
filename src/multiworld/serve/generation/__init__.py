"""Text generation whose streams survive the loss of any worker.

A gateway holds the tokens of each stream and pins it to a *replica chain*: one replica
of each stage. The stage 0 replica schedules steps, which flow through the chain; the
last stage samples. When a replica of a chain is lost, the gateway pins its streams to
other replicas, which recompute them from the tokens that were delivered.
"""
