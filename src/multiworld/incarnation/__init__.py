"""State machine of one incarnation of a world, and the events that it emits."""
