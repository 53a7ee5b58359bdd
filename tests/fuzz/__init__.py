"""Random input for everything that reads bytes from outside; it takes a minute."""
