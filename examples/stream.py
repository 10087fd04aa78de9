"""Prints text as it is generated. Each result has all the text so far.

python examples/stream.py "Why is the sky blue?"
"""

import sys

from slipstream import LLM, SamplingParams

question = " ".join(sys.argv[1:]) or "Why is the sky blue?"

with LLM() as llm:
    shown = 0
    params = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=200)
    for output in llm.stream_chat([{"role": "user", "content": question}], params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
