"""Desired and observed state of a service, and the reconciler between them."""
