"""Models that draft tokens for another model."""
