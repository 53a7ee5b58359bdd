"""Placement: the choice of a machine for each replica."""
