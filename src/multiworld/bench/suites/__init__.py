"""The suites: each measures one thing for all who can do it."""
