"""Counters in shared memory, and their text for Prometheus."""
