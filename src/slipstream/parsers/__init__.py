"""Tool calls and reasoning in what a model writes."""
