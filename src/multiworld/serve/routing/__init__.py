"""Load balancing, loss accounting and refusals, for gateways and replicas."""
