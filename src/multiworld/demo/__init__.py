"""Demos started by the command `multiworld demo`."""
