"""Which replica goes on which machine."""
