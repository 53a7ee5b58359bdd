"""How many replicas each stage of a model should have: pure functions of a snapshot.

``policy.decide`` is the default; a spec's ``scaling:`` names another. The controller
and ``multiworld simulate`` ask the same functions the same question.
"""
