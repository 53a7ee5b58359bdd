"""Edges between processes of a service: connections, messages and the routing table."""
