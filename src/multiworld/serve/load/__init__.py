"""Open-loop load generator: sends requests on time, without waiting for answers."""
