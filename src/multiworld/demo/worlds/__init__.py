"""Worlds demo: a leader loses a worker; only the worlds of that worker break."""
