"""A page that shows a running service, and the server of the page."""
