"""Images and videos of requests: fetched, decoded, cut into a tower's patches, placed in a prompt. No torch."""
