"""Request routing: dispatch, replay, hedging and poison-request isolation."""
