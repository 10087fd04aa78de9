"""Streams, events, memory and the sync detector: all that touches torch's device API."""
