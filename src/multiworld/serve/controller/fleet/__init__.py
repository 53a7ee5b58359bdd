"""State of all processes, and the decisions that follow from each event."""
