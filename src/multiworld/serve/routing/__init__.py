"""What a router does with every request."""
