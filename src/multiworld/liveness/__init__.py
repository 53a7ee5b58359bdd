"""Which processes are alive: control links, heartbeats and the failure detector."""
