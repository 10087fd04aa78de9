"""ImagePrompts: the images of prompts and of chat messages, from what a caller gives to what a core takes.

An image is loaded before its prompt is prepared, because it may have to be fetched; the prompt then has `LoadedImages`
in place of what was given. The files are decoded in child processes, see `images/loader.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt, UserError
from slipstream.contracts.images import ImageInput, PromptImages
from slipstream.engine.model_description import ModelDescription
from slipstream.images.prompt import expand_ids, spell_image
from slipstream.params.sampling import SamplingParams
from slipstream.text.chat_fields import ImageMark

if TYPE_CHECKING:  # Pillow is optional
    from slipstream.images.loader import ImageLoader
    from slipstream.images.pixels import PreparedImage

FIELD = "multi_modal_data"
_PARTS = ("image_url", "image_pil", "image")  # of chat messages, by the field that has the image


class LoadedImages(NamedTuple):
    images: list[PreparedImage]
    add_special_tokens: bool  # when the prompt's text is tokenised


def has_images(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and bool(prompt.get(FIELD))


class ImagePrompts:
    def __init__(self, description: ModelDescription) -> None:
        self.description = description
        self._loader: ImageLoader | None = None  # opened for the first image
        self._lock = threading.Lock()

    def load_all(self, prompts: Sequence[Any], *, add_special_tokens: bool) -> Sequence[Any]:
        """The prompts, with their images loaded. Waits for them; the caller may run an event loop."""
        if not any(map(has_images, prompts)):
            return prompts

        async def load() -> list[Any]:
            loaded: list[Any] = []
            try:
                for each in prompts:
                    loaded.append(await self.load(each, add_special_tokens=add_special_tokens))
            except UserError as error:
                raise error.of_prompt(len(loaded), len(prompts)) from None
            return loaded

        with self._lock, ThreadPoolExecutor(1, "slipstream-load-images") as pool:
            return pool.submit(asyncio.run, load()).result()

    async def load(self, prompt: Any, *, add_special_tokens: bool, caller: str = "") -> Any:
        """The prompt, with its images loaded. Raises InvalidPrompt."""
        if not has_images(prompt):
            return prompt
        sources = self._sources(prompt[FIELD])
        if self._loader is None:
            self._loader = _open(self.description)
        found = await self._loader.load(sources, caller, "image")
        return {**prompt, FIELD: LoadedImages(found, add_special_tokens)}

    def _sources(self, given: Any) -> list[Any]:
        """The images of a prompt's `multi_modal_data`."""
        self.check_takes_images()
        if not isinstance(given, Mapping) or set(given) != {"image"}:
            found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise InvalidPrompt(f"{FIELD} is {found!r:.100}; give an object with image", param=FIELD)
        images = given["image"]
        sources = list(images) if isinstance(images, list | tuple) else [images]
        if len(sources) > (limit := self.description.max_images):
            raise InvalidPrompt(
                f"the prompt has {len(sources)} images, and at most {limit} are accepted; send fewer, or raise "
                "limit_mm_per_prompt",
                param=FIELD,
            )
        if not sources:
            raise InvalidPrompt(f"{FIELD} has an empty list of images; leave it out", param=FIELD)
        return sources

    def check_takes_images(self) -> None:
        if self.description.images is None:
            name, why = self.description.name, self.description.why_no_images
            raise InvalidPrompt(f"{name} takes no images: {why}; send texts only, or take another model", param=FIELD)

    def expand(self, loaded: object, ids: Sequence[int], params: SamplingParams) -> tuple[list[int], PromptImages]:
        """The prompt's token ids with a token for each row of an image, and its images. `ids` has one for each image,
        or all."""
        if not isinstance(loaded, LoadedImages):
            raise InvalidPrompt(f"{FIELD} is not taken here; use generate, chat or stream", param=FIELD)
        if params.truncate_prompt_tokens is not None:
            raise InvalidParams(
                "truncate_prompt_tokens would cut images; leave it out for prompts with images",
                param="truncate_prompt_tokens",
            )
        info, images = self.description.images, loaded.images
        assert info is not None
        placed = expand_ids(info, ids, [spell_image(info, image) for image in images])
        inputs = [ImageInput.of(each.key, each.num_tokens, each.grids, each.patches) for each in images]
        return placed.token_ids, PromptImages(inputs, placed.spans, placed.shift)

    def take_parts(self, messages: Any) -> tuple[Any, list[Any]]:
        """The messages of a chat with marks for their images, and these images."""
        if not isinstance(messages, list | tuple):
            return messages, []  # refused where they are rendered
        found: list[Any] = []
        taken = []
        for index, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple) and any(map(_is_image, content)):
                self.check_takes_images()
                path = f"messages[{index}].content"
                parts = []
                for number, part in enumerate(content):
                    if _is_image(part):
                        found.append(_source_of(part, f"{path}[{number}]"))
                        part = ImageMark()
                    parts.append(part)
                message = {**message, "content": parts}
            taken.append(message)
        return (taken if found else messages), found

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def _open(description: ModelDescription) -> ImageLoader:
    try:
        from slipstream.images.fetch import FetchRules
        from slipstream.images.loader import ImageLoader, MediaRules
    except ImportError:
        raise InvalidOption(
            "images need Pillow, which is not installed; install slipstream[images], or set limit_mm_per_prompt to 0"
        ) from None
    assert description.images is not None, "images are refused before"
    rules = MediaRules(fetch=FetchRules(domains=description.media_domains), folder=description.media_folder)
    return ImageLoader(description.images, rules)


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def _source_of(part: Mapping[str, Any], path: str) -> Any:
    kind = part["type"]
    unknown = sorted(map(str, set(part) - {"type", kind}))
    source = part.get(kind)
    if isinstance(source, Mapping):
        detail = source.get("detail")
        unknown += sorted(map(str, set(source) - {"url", "detail"}))
        if detail not in (None, "auto"):
            raise InvalidPrompt(
                f"{path} has the detail {detail!r:.50}; images have the size that mm_processor_kwargs gives them: "
                "leave it out",
                param=path,
            )
        source = source.get("url")
    if unknown or source is None or (kind == "image_url" and not isinstance(source, str)):
        raise InvalidPrompt(
            f"{path} is no image: {', '.join(unknown) or kind} is wrong; give "
            '{"type": "image_url", "image_url": {"url": URL}}, with an http, https or data URL',
            param=path,
        )
    return source
