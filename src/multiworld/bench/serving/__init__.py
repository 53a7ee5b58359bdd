"""Services to be measured, and the clients that ask them."""
