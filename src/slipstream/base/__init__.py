"""Errors, log, files, processes and the host: code that needs no other package of ours."""

__version__ = "0.1.0"
