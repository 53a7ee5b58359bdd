"""The process that decides: desired state, reconciliation, the admin socket."""
