"""Texts to vectors, the nearest of some documents, and a model that generates and embeds at once.

python examples/embed.py
"""

import numpy as np

from slipstream import LLM, SamplingParams

DOCUMENTS = [
    "The tram to the harbour leaves every ten minutes.",
    "Bread rises because yeast gives off carbon dioxide.",
    "A page is the unit of the cache.",
]

# the embedded all-MiniLM-L6-v2
with LLM(task="embed") as llm:
    vectors = np.stack([one.outputs.data for one in llm.embed(DOCUMENTS)])
    print("vectors:", vectors.shape)
    for one in llm.rerank("Why does dough get bigger?", DOCUMENTS, top_n=2):
        print(f"{one.score:.3f}  {one.document}")
    print("score:", llm.score("a tram", "a train")[0].outputs.score)

# a model that generates can embed too
with LLM() as llm:
    print("vector of a chat model:", len(llm.embed("Once upon a time")[0].outputs.embedding))
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
