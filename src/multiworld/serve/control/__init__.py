"""The controller: what is wanted, what runs, and what to do about the difference."""
