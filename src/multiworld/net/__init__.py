"""Sockets, TLS, secrets and framing: what every connection is made of."""
