"""The state of all processes, and what follows from each event."""
