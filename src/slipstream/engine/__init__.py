"""The loop of a model: plan, launch, commit; several models, pacing, device timing, ranks, recorder."""
