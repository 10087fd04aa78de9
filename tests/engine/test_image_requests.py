"""Images from the call to the tokens: those of transformers, whatever the schedule (law 7), in float64 on the CPU."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from causal_oracle import exact_math, norm_in_float64
from delayed_device import DelayedDevice
from law7_engine import assert_same, logprobs, preempt_after
from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt, UserError
from slipstream.checkpoint.image_info import ImageInfo, read_image_info
from slipstream.record.record_file import decode
from slipstream.record.replay import replay
from tiny_towers import library_inputs, pictures, write_tower
from tiny_vision import picture

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = [(70, 110), (97, 333), (61, 58)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    + MARK
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def shown(count: int, first: int = 0) -> dict[str, Any]:
    """A prompt with some of the pictures."""
    numbers = [(first + index) % len(SIZES) for index in range(count)]
    text = "".join(f"see {index} {MARK}" for index in numbers) + " and say"
    images = [picture(*SIZES[number], number) for number in numbers]
    return {"prompt": text, "multi_modal_data": {"image": images}} if count else {"prompt": text}


PROMPTS = [shown(1), shown(0), shown(3), shown(1, 1), shown(2, 1)]


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_pages": 400, "page_size": 8, "max_model_len": 400, "depth": 0} | options
    return LLM(str(folder), device="cpu", dtype="float64", **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, ImageInfo]] = {}

    def checkpoint(family: str) -> tuple[Path, ImageInfo]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, write_tower(family, folder, torch.float64)
        return made[family]

    return checkpoint


@pytest.fixture(scope="module")
def model(checkpoints: Any) -> Path:
    """Windows of attention in the tower are those of Qwen2.5; features behind the first layers those of Qwen3."""
    return checkpoints("qwen3_vl")[0]


@pytest.fixture(scope="module")
def wanted(model: Path) -> Any:
    with make(model) as llm:
        return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def library_choices(folder: Path, info: ImageInfo, ids: list[int], count: int) -> torch.Tensor:
    """The likeliest token behind each of the ids, of a prompt with `count` pictures."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    norm_in_float64(model)
    whole = torch.tensor([ids])
    fields = library_inputs(pictures(info, *SIZES[:count]), info) if count else {}
    assert info.prompt is not None
    with exact_math(torch.float64):
        fields["mm_token_type_ids"] = (whole == info.prompt.token_id).int()
        return model(whole, **fields).logits[0].argmax(-1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_greedy_tokens_are_those_of_transformers(family: str, checkpoints: Any) -> None:
    folder, info = checkpoints(family)
    prompts = [shown(count) for count in (0, 1, 3)]
    with make(folder) as llm:
        together = llm.generate(prompts, GREEDY)
        llm.reset_prefix_cache()
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        other = llm.generate(prompts[1] | {"multi_modal_data": {"image": picture(*SIZES[0], 9)}}, GREEDY)
    assert_same(together, alone)
    (here,), (there,) = (logprobs(each)[:1] for each in ([alone[1]], other))
    assert any(abs(here[token] - there.get(token, 0.0)) > 1e-3 for token in here), "pixels do not matter"
    for count, result in zip((0, 1, 3), together, strict=True):
        found = list(result.outputs[0].token_ids)
        assert result.prompt_token_ids is not None and result.prompt == shown(count)["prompt"]
        ids = [*result.prompt_token_ids, *found]
        choices = library_choices(folder, info, ids[:-1], count)
        assert choices[-len(found) :].tolist() == found


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 11, 64, 400])
def test_tokens_do_not_depend_on_borders_of_chunks(model: Path, wanted: Any, size: int, depth: int) -> None:
    """With one token a step there is a border at every offset of every image."""
    rows = min(size, 4)
    with make(model, max_num_batched_tokens=size, max_num_seqs=rows, depth=depth) as llm:
        for _ in range(2):  # the second time the cache is warm
            assert_same(llm.generate(PROMPTS if size > 2 else PROMPTS[:2], GREEDY), wanted if size > 2 else wanted[:2])
            llm.core.scheduler.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_do_not_depend_on_the_order_of_prompts_or_the_cache(model: Path, wanted: Any, depth: int) -> None:
    with make(model, enable_prefix_caching=False, max_num_batched_tokens=96, depth=depth) as llm:
        assert_same(llm.generate(PROMPTS[::-1], GREEDY), wanted[::-1])


@pytest.mark.parametrize("steps", [2, 4, 7])
@pytest.mark.parametrize("cached", [False, True])
def test_tokens_do_not_depend_on_preemption(model: Path, wanted: Any, steps: int, cached: bool) -> None:
    with make(model, max_num_batched_tokens=64, enable_prefix_caching=cached, depth=1) as llm:
        preempt_after(llm, steps)
        assert_same(llm.generate(PROMPTS, GREEDY), wanted)
        assert llm.core.scheduler.num_preemptions


def test_tokens_do_not_depend_on_a_late_device(model: Path, wanted: Any) -> None:
    device = DelayedDevice(2)
    with make(model, max_num_batched_tokens=48, depth=2, _device=device) as llm:
        assert_same(llm.generate(PROMPTS, GREEDY), wanted)


def test_images_are_encoded_once_for_all_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    with make(model) as llm:
        launch = llm.core.executor.launch

        def count(plan: Any) -> None:
            encoded.extend(() if plan.images is None else plan.images.encodings)
            launch(plan)

        monkeypatch.setattr(llm.core.executor, "launch", count)
        llm.generate(PROMPTS, GREEDY)
        assert len(encoded) == len(SIZES)
        llm.generate(PROMPTS, GREEDY)  # the prefix is cached
        assert len(encoded) == len(SIZES)


def test_n_samples_and_prompt_logprobs_work_with_images(model: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, logprobs=1, prompt_logprobs=1)
    with make(model) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    with make(model, max_num_batched_tokens=40, depth=1) as llm:
        assert_same(llm.generate(PROMPTS, params), alone)


def test_a_chat_has_images_between_texts(model: Path) -> None:
    image = picture(*SIZES[0], 0)
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": " <|image_pad|> and say"}]}
    ]
    with make(model, chat_template=TEMPLATE) as llm:
        (result,) = llm.chat(messages, GREEDY)
        pad = llm.tokenizer.encode("<|image_pad|>", add_special_tokens=False)[0]
        info = read_image_info(model)
        assert info is not None
        assert result.prompt_token_ids.count(pad) == pictures(info, SIZES[0])[0].num_tokens
        ids = list(result.prompt_token_ids)
        once = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": image}}, GREEDY)[0]
        assert once.outputs[0].token_ids == result.outputs[0].token_ids
        pil = [parts[0], {"type": "image_pil", "image_pil": image}, messages[0]["content"][2]]
        (streamed,) = list(llm.stream_chat([{"role": "user", "content": pil}], GREEDY))[-1:]
        assert streamed.outputs[0].token_ids == result.outputs[0].token_ids
        for content, error in (
            ([{"type": "image_url", "image_url": {"url": url, "detail": "low"}}], "detail"),
            ([{"type": "image_url", "image_url": {"uri": url}}], "is no image: uri is wrong"),
            ([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], "the server allows no domain"),
            ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "no folder is allowed"),
            ([{"type": "image_url", "image_url": {"url": url[:60]}}], "base64|PNG"),
        ):
            with pytest.raises(UserError, match=error):
                llm.chat([{"role": "user", "content": content}], GREEDY)
        assert llm.chat(messages, GREEDY)[0].outputs[0].token_ids == result.outputs[0].token_ids


def test_what_cannot_be_is_refused_by_name(model: Path) -> None:
    one = shown(1)
    with make(model, limit_mm_per_prompt={"image": 2}, max_model_len=120) as llm:
        for prompt, error in (
            (shown(3), "the prompt has 3 images, and at most 2 are accepted"),
            (one | {"prompt": "none"}, "the prompt has 0 tokens of images"),
            (one | {"prompt": MARK * 2}, "the prompt has 2 tokens of images"),
            (one | {"multi_modal_data": {"video": one}}, "multi_modal_data is .'video'.*; give an object with image"),
            (one | {"multi_modal_data": {"image": 7}}, "an image is int; give a URL"),
            (one | {"multi_modal_uuids": {"image": ["a"]}}, "a prompt object has no 'multi_modal_uuids'"),
            (one | {"prompt": MARK + "x" * 120}, "tokens, and .* maximum context length is 120"),
        ):
            with pytest.raises(UserError, match=error):
                llm.generate(prompt, GREEDY)
        with pytest.raises(InvalidParams, match="would cut images"):
            llm.generate(one, SamplingParams(truncate_prompt_tokens=5))
        assert llm.generate(one, GREEDY)
    with make(model, limit_mm_per_prompt={"image": 0}) as llm:
        assert llm.core.config.images is None
        with pytest.raises(InvalidPrompt, match="takes no images: limit_mm_per_prompt allows none"):
            llm.generate(one, GREEDY)
    with make(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as llm:
        with pytest.raises(InvalidPrompt, match="images do not run with speculative_config yet"):
            llm.generate(one, GREEDY)
    with pytest.raises(InvalidOption, match="mm_processor_kwargs has longest"):
        make(model, mm_processor_kwargs={"longest": 5})
    with pytest.raises(InvalidOption, match="limit_mm_per_prompt is"):
        make(model, limit_mm_per_prompt={"picture": 5})


def test_options_of_the_processor_change_the_number_of_tokens(model: Path) -> None:
    with make(model, mm_processor_kwargs={"max_pixels": 4096}) as llm:
        (result,) = llm.generate(shown(1), GREEDY)
        assert result.prompt_token_ids.count(llm.core.config.model.images.prompt.token_id) <= 4


def test_a_recording_with_images_can_be_replayed(model: Path) -> None:
    with make(model, record_steps=100, max_num_batched_tokens=64, depth=1) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        recorder, runner = llm.core.recorder, llm.core.executor
        assert recorder is not None
        whole = decode(recorder.take().encode(), "whole")
        assert decode(recorder.take().encode(redact=True), "redacted").redacted
        outcome = replay(whole, runner)
        assert (outcome.fault, outcome.difference, outcome.error) == (None, None, None) and outcome.num_compared > 3
    with make(model, record_steps=8, max_num_batched_tokens=64) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        llm.reset_prefix_cache()
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4))  # its image is not in the recording
        assert llm.core.recorder is not None
        late = decode(llm.core.recorder.take().encode(), "late")
        outcome = replay(late)
        assert outcome.fault is None and not any(step.plan.images.encodings for step in late.steps if step.plan.images)


def test_an_asynchronous_engine_takes_images_and_texts_together(model: Path, wanted: Any) -> None:
    async def run() -> list[Any]:
        options = {"num_pages": 400, "page_size": 8, "max_model_len": 400, "depth": 1, "max_num_batched_tokens": 64}
        engine = AsyncEngine(str(model), device="cpu", dtype="float64", chat_template=TEMPLATE, **options)

        async def last(stream: Any) -> Any:
            return [result async for result in stream][-1]

        try:
            found = await asyncio.gather(*(last(engine.generate(prompt, GREEDY)) for prompt in PROMPTS))
            with pytest.raises(UserError, match="the prompt has 2 tokens of images"):
                await last(engine.generate(PROMPTS[0] | {"prompt": MARK * 2}, GREEDY))
            parts = [{"type": "image_pil", "image_pil": picture(*SIZES[0], 0)}, {"type": "text", "text": "and"}]
            assert (await last(engine.chat([{"role": "user", "content": parts}], GREEDY))).outputs[0].token_ids
            return found
        finally:
            await engine.close()

    assert_same(asyncio.run(run()), wanted)
