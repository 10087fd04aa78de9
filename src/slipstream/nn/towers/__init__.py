"""Towers: the encoders of images in front of a text model. One tower over shared layers, families as data."""
