"""Options to a frozen EngineConfig: checks, defaults, and estimates of memory."""
