"""The device half: runs a StepPlan, from its upload to its results."""
