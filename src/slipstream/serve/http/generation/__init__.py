"""Parts that all dialects of generation share: fields, conversations, grammars, tools, streams."""
