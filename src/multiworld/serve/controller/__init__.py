"""The controller process: desired state, reconciliation, the admin socket."""
