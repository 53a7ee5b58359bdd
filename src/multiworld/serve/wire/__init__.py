"""Messages between the processes of a service."""
