"""The loop of a model: plan, launch, commit; several models, pacing, building, sleep."""
