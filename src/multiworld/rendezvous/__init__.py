"""How the members of a world meet: a small store, and sessions with it.

``registry`` and ``values`` decide, ``service`` carries out, ``server`` puts it on a TCP
port, ``session`` is the client's side.
"""
