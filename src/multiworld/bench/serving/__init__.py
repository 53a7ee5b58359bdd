"""Services to be measured, and the clients that ask them."""

OURS, WHOLE, RAY = "three stages", "one stage", "ray serve"
