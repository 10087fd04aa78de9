"""Load against a server, measured."""
