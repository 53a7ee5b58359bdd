"""Autoscaling of the stages of a model.

Policies are pure functions of a snapshot. ``default_policy.decide`` is the default; a
spec's ``scaling:`` names another. The controller and ``multiworld simulate`` call the
same functions.
"""
