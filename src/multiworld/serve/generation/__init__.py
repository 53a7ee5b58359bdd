"""Text generation whose streams survive the loss of any worker.

A gateway holds the tokens of each stream and pins it to a *replica chain*: one replica
of each stage. Stage 0 schedules steps, and the last stage samples. When a replica is
lost, its streams continue on others, which recompute them from the delivered tokens.
"""
