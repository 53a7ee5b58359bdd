"""Which replica gets work, and what follows from losses: for gateways and replicas."""
