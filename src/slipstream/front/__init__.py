"""The front end's part of a request: strings in, tokens to the core, texts and arrays out. No torch."""
