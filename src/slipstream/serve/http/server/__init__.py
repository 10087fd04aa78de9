"""HTTP itself: listen, parse, requests, responses, limits, state, replicas by URL, batches."""
