"""Rendezvous of a world's members: ``admission`` and ``values`` decide,
``store_service`` carries out their decisions, ``store_server`` serves the store on a
TCP port, and ``store_session`` is the client."""
