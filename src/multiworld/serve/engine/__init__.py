"""What computes."""
