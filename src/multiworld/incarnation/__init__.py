"""The life of one epoch of a world: its state machine and the events it emits."""
