"""Fair queueing among tenants."""
