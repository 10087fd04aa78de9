"""Two turns of a conversation.

python examples/chat.py
"""

from slipstream import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=64)
messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the largest planet?"},
]

with LLM() as llm:
    for question in ("How many moons does it have?", None):
        answer = llm.chat(messages, params)[0].outputs[0].text
        print(f"{messages[-1]['content']}\n    {answer}")
        messages.append({"role": "assistant", "content": answer})
        if question is not None:
            messages.append({"role": "user", "content": question})
