"""The text and the positions of images in a prompt.

Two steps, so that long runs of image tokens need not be tokenised: `expand_text` replaces each placeholder of the text
by the words around an image, with one image token for each run of them; after the text is tokenised, `expand_ids`
repeats these tokens and notes where they are. Special tokens separate words, so the ids are those of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from slipstream.base.errors import InvalidPrompt
from slipstream.checkpoint.image_info import ImageInfo, PromptRule
from slipstream.contracts.images import Grid, ImageSpan

if TYPE_CHECKING:  # Pillow is optional
    from slipstream.images.pixels import PreparedImage


class SpelledImage(msgspec.Struct, frozen=True):
    text: str
    runs: tuple[Grid, ...]  # of image tokens, one for each in the text
    token_id: int
    step: float = 1.0  # between the temporal positions of two frames


class PlacedImages(msgspec.Struct, frozen=True):
    token_ids: list[int]
    spans: list[ImageSpan]  # in the order of the prompt
    shift: int  # position of a later token, less its index


def spell_image(info: ImageInfo, image: PreparedImage) -> SpelledImage:
    """Returns the words of an image in the prompt."""
    rule = info.prompt
    assert rule is not None, f"{info.family} has no prompts with images"
    grids = [(frames, rows // info.merge, cols // info.merge) for frames, rows, cols in image.grids]
    if rule.row_break:
        _, rows, cols = grids[0]
        text = (rule.token + rule.row_break) * (rows - 1) + rule.token + rule.last_break
        return SpelledImage(text, ((1, 1, cols),) * rows, rule.token_id)
    if rule.tile and image.tiles != (0, 0):
        return SpelledImage("".join(_tiles(rule, image.tiles, len(grids))), tuple(grids), rule.token_id)
    one = rule.start + rule.single + rule.token + rule.end
    if rule.crops and len(grids) > 1:
        whole, crops = rule.crops
        return SpelledImage(whole + one + crops + " ".join([one] * (len(grids) - 1)), tuple(grids), rule.token_id)
    if len(grids) == 1 and grids[0][1] * grids[0][2] == image.num_tokens:
        return SpelledImage(one, (grids[0],), rule.token_id)
    return SpelledImage(one, ((1, 1, image.num_tokens),), rule.token_id)


def spell_video(info: ImageInfo, video: PreparedImage) -> SpelledImage:
    rule = info.video
    assert rule is not None, f"{info.family} has no prompts with videos"
    frames, rows, cols = video.grids[0]
    rows, cols = rows // info.merge, cols // info.merge
    if rule.by_time:
        text = "".join(f"<{seconds:.1f} seconds>{rule.start}{rule.token}{rule.end}" for seconds in video.times)
        return SpelledImage(text, ((1, rows, cols),) * frames, rule.token_id)
    step = rule.tokens_per_second * video.seconds or 1.0
    return SpelledImage(rule.token, ((frames, rows, cols),), rule.token_id, step)


def _tiles(rule: PromptRule, tiles: tuple[int, int], num_views: int) -> Iterator[str]:
    yield rule.start
    for row in range(tiles[0]):
        for col in range(tiles[1]):
            yield rule.tile.replace("{row}", str(row + 1)).replace("{col}", str(col + 1)) + rule.token
        yield rule.row_end
    if num_views > tiles[0] * tiles[1]:
        yield rule.whole + rule.token
    yield rule.end


def expand_text(
    info: ImageInfo, text: str, images: Sequence[SpelledImage], videos: Sequence[SpelledImage]
) -> tuple[str, list[SpelledImage]]:
    """The text with all placeholders replaced, and the images and videos in its order. Raises InvalidPrompt unless
    there is a placeholder for each.

    In a chat, this runs before the text of messages is unmasked (`text/control_tokens.py`), so that only placeholders
    of the template count.
    """
    rule = info.prompt
    kinds = {"image": (rule.placeholder,) if rule else (), "video": info.video.placeholders if info.video else ()}
    left = {"image": list(reversed(images)), "video": list(reversed(videos))}
    given = {name: len(spelled) for name, spelled in left.items()}
    found = dict.fromkeys(kinds, 0)
    order: list[SpelledImage] = []

    def replace(match: re.Match[str]) -> str:
        kind = match.lastgroup or ""
        found[kind] += 1
        if not left[kind]:
            return ""
        order.append(left[kind].pop())
        return order[-1].text

    groups = [f"(?P<{kind}>{'|'.join(map(re.escape, texts))})" for kind, texts in kinds.items() if texts]
    expanded = re.sub("|".join(groups), replace, text) if groups else text
    for kind, texts in kinds.items():
        if found[kind] != given[kind]:
            where = f"{found[kind]} times the placeholder {texts[-1]}" if texts else "no place"
            raise InvalidPrompt(
                f"the prompt has {where} for {given[kind]} {kind}{'s' * (given[kind] != 1)}; write it once for each"
            )
    return expanded, order


def expand_ids(info: ImageInfo, token_ids: Sequence[int], spelled: Sequence[SpelledImage]) -> PlacedImages:
    """Repeats the image tokens of each run. `spelled`: in the order of the prompt. Ids in which they are repeated
    already stay as they are. Raises InvalidPrompt if the ids have other numbers of image tokens."""
    tokens = {each.token_id for each in spelled}
    runs = [(image, each, grid) for image, each in enumerate(spelled) for grid in each.runs]
    found = [index for index, token in enumerate(token_ids) if token in tokens]
    num_rows = sum(frames * rows * cols for _, _, (frames, rows, cols) in runs)
    is_repeated = len(found) == num_rows
    if not is_repeated and len(found) != len(runs):
        raise InvalidPrompt(
            f"the prompt has {len(found)} tokens of images, and its {len(spelled)} images need {len(runs)} to expand, "
            f"or {num_rows}; give one placeholder for each image"
        )
    made: list[int] = []
    spans: list[ImageSpan] = []
    done = shift = used = 0
    rows = [0] * len(spelled)  # of each image that its spans have so far
    for image, each, grid in runs:
        index = found[used]
        if token_ids[index] != each.token_id:
            raise InvalidPrompt(f"token {index} of the prompt is not of image {image + 1}; keep their order")
        made += token_ids[done:index]
        span = ImageSpan(image, len(made), grid, len(made) + shift, each.step, rows[image])
        rows[image] += span.count
        made += [each.token_id] * span.count
        taken = span.count if is_repeated else 1
        if found[used + taken - 1] != index + taken - 1:
            raise InvalidPrompt(f"the tokens of image {image + 1} are not one behind the other; keep them together")
        done, used = index + taken, used + taken
        spans.append(span)
        shift = span.next_position() - len(made) if info.mrope else 0
    made += token_ids[done:]
    return PlacedImages(made, spans, shift)
