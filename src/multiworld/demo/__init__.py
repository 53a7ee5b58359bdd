"""The demos of the command `multiworld demo`."""
