"""The dashboard: a page that shows a running service, and the page's server."""
