"""Rendezvous of a world's members: a small store, and sessions with it.

``registry`` and ``values`` decide, ``store_service`` carries out their decisions,
``store_server`` serves them on a TCP port, and ``store_session`` is the client.
"""
