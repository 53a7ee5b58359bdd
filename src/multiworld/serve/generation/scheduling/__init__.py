"""Choice of the tokens that each step computes. Pure."""
