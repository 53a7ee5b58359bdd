"""Who may ask for what, and how much of it: tenants, their keys, limits and usage."""
