"""Sampling as stages on the device."""
