"""What an operator uses, in real programs: ``make test-operate``."""
