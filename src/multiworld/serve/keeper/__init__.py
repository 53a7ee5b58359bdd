"""The stream keeper: a process that holds clients' connections for the gateways."""
