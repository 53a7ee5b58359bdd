"""Placement of replicas on machines: bookings, problem builder and replanner."""
