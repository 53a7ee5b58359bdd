"""Autoscaling of the stages of a model. Policies are pure functions of a snapshot, for
the controller and for ``multiworld simulate``."""
