"""Sequences at a replica, and their recovery after losses."""
