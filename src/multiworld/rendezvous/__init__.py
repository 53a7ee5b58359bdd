"""Rendezvous of a world's members: ``registry`` and ``values`` decide,
``store_service`` carries out their decisions, ``store_server`` serves them on a TCP
port, ``store_session`` is the client."""
