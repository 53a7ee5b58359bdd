"""Tests of what an operator uses, with real programs: ``make test-operate``."""
