"""Two prompts at once, each streamed as it grows: `.venv/bin/python examples/async_stream.py`."""

import asyncio

from slipstream import AsyncEngine, SamplingParams


async def show(engine: AsyncEngine, prompt: str) -> None:
    shown = ""
    async for result in engine.generate(prompt, SamplingParams(temperature=0.7, max_tokens=24)):
        text = result.outputs[0].text
        print(f"{prompt!r} + {text[len(shown) :]!r}")
        shown = text


async def main() -> None:
    engine = AsyncEngine()
    await asyncio.gather(show(engine, "The sea is"), show(engine, "Mountains are"))
    await engine.close()


asyncio.run(main())
