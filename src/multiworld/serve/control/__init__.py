"""The controller of a service: desired state, observed state, and reconciling them."""
