"""What requests and streams share: losses, load balancing, refusals."""
