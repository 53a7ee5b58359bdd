"""Scheduling: the choice of the tokens that each step computes."""
