"""An open-loop load generator: requests leave on time, whatever became of others."""
