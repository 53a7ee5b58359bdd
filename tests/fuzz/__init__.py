"""Random input for everything that reads bytes from outside; a minute in all."""
