"""What a front end does with prompts and results: strings in, tokens to the core, texts and arrays out. No torch."""
