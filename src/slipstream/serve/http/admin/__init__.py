"""Routes about the server: health, metrics, models, adapters, sleep, tokens, the page."""
