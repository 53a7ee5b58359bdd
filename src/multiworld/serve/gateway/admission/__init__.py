"""Which requests are let in: keys, rate limits, budgets, quarantine."""
