"""Worlds demo: a leader in three worlds loses a worker, and only its worlds break."""
