"""The HTTP server: worker, table of routes, and the folders of its routes."""
