"""Which tokens each step computes."""
