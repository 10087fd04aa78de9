"""ImageInfo: what a model's files say about images: their sizes, filter, patches, normalisation, and text in a prompt.

The image processor decides how a picture is resized, the family what the prompt says and how patches are ordered.
Newer checkpoints have one processor_config.json with the image processor in it, which is preferred; older ones
preprocessor_config.json. The towers read the same values from config.json, so sizes of patches are checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel
from slipstream.base.files import load_json
from slipstream.checkpoint.image_families import FAMILIES, PROCESSORS, SHARED, FamilyOfImages

# The kinds of sizes. Sides are in pixels, areas in square pixels.


class PanAndScan(msgspec.Struct, frozen=True):
    """Crops of a long picture, which follow the whole one as further images."""

    smallest: int  # side of a crop
    most: int  # crops
    ratio: float  # of the longer side to the shorter one, from which a picture is cut


class StretchedSize(msgspec.Struct, frozen=True, tag="stretched"):
    """One fixed size, whatever the shape of the picture."""

    height: int
    width: int
    crops: PanAndScan | None = None


class CroppedSize(msgspec.Struct, frozen=True, tag="cropped"):
    """The shorter side gets a fixed length, and the middle is cut out."""

    shortest: int
    height: int
    width: int


class SmartSize(msgspec.Struct, frozen=True, tag="smart"):
    """About the size and shape of the picture: sides are multiples of `factor`, and the area has two bounds."""

    factor: int
    least: int  # area
    most: int
    frames: int = 1  # that the bounds of the area count
    # of pictures with a side under `factor`: as they are, scaled up first, scaled and rounded, only the target
    small: Literal["keep", "scale", "round", "clamp"] = "keep"


class BudgetSize(msgspec.Struct, frozen=True, tag="budget"):
    """The shape of the picture at the largest size that a number of tokens allows."""

    side: int  # of a token
    tokens: int


class FittedSize(msgspec.Struct, frozen=True, tag="fitted"):
    """At most `longest` pixels a side, then both sides up to multiples of `factor`."""

    longest: int
    factor: int


class SplitSize(msgspec.Struct, frozen=True, tag="split"):
    """The longer side gets a fixed length, the picture is cut into tiles and follows them as a whole."""

    longest: int
    tile: int
    has_tiles: bool


class TiledSize(msgspec.Struct, frozen=True, tag="tiled"):
    """A grid of tiles of about the shape of the picture, and behind more than one of them the whole picture."""

    height: int  # of a tile
    width: int
    least: int  # tiles
    most: int


class PinpointSize(msgspec.Struct, frozen=True, tag="pinpoint"):
    """The whole picture, then tiles of it at the best of some sizes, with black borders."""

    tile: int
    sizes: tuple[tuple[int, int], ...]  # height and width of each
    most: int  # tiles whose tokens the model does not reduce
    fill: tuple[int, int, int]  # colour of the borders if a prompt has several pictures, which have no tiles


class SmartTiledSize(msgspec.Struct, frozen=True, tag="smart_tiled"):
    """One picture of a smart size; a large one in tiles, and behind them that picture."""

    tile: int
    least: int  # tiles
    most: int
    has_whole: bool
    area: float  # from which a picture is cut
    whole: SmartSize


class PaddedSize(msgspec.Struct, frozen=True, tag="padded"):
    """A large picture in tiles, and behind them the whole picture on a square."""

    side: int  # of the square
    tile: int
    least: int  # tiles
    most: int
    fill: tuple[int, int, int]


class PatchesSize(msgspec.Struct, frozen=True, tag="patches"):
    """The shape of the picture at the largest size that a number of patches allows."""

    patch: int
    most: int


ImageSize = (
    StretchedSize | CroppedSize | SmartSize | BudgetSize | FittedSize | SplitSize | TiledSize | PinpointSize
    | SmartTiledSize | PaddedSize | PatchesSize
)  # fmt: skip


class PromptRule(msgspec.Struct, frozen=True, kw_only=True):
    """Words of a prompt around a picture and its tiles."""

    placeholder: str  # written by chat templates, once for each picture
    token: str  # one row of the tower's output
    token_id: int
    start: str = ""
    end: str = ""
    tile: str = ""  # before a tile; {row} and {col} count from 1
    row_end: str = ""  # behind a row of tiles
    whole: str = ""  # before the whole picture behind its tiles
    single: str = ""  # before a picture without tiles
    row_break: str = ""  # between two rows of tokens
    last_break: str = ""  # behind the last row of tokens
    crops: tuple[str, str] | None = None  # before a picture that has crops, and between it and them
    document: str = ""  # the prompt of a lone picture, in a model that compares them with queries
    query: str = ""  # the prompt of a query, with {text}


class VideoRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames of a video are used, their size, and what they become in a prompt."""

    placeholders: tuple[str, ...]  # the first that a prompt has is replaced
    token: str
    token_id: int
    size: SmartSize
    fps: float | None  # None: all frames, unless a number is given
    least: int  # frames
    most: int
    by_time: bool  # each pair of frames is an image of its own, behind its time in seconds
    start: str = ""
    end: str = ""
    tokens_per_second: float = 0.0  # distance of temporal positions; 0: pairs are 1 apart


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    family: str  # model_type of config.json
    size: ImageSize
    filter: Literal["lanczos", "bilinear", "bicubic"]
    rescale: float  # the first step of a tower: (value * rescale - mean) / std
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch: int  # side
    merge: int  # patches to each side that become one token
    frames: int  # of a patch: a single picture is repeated
    channels_last: bool  # order of a patch's values: (y, x, channel); else (channel, frame, y, x)
    in_blocks: bool  # order of patches: those of one token together; else row by row
    attention: Literal["causal", "images", "prompt"]  # what sees its later tokens too: nothing, each image, the prompt
    mrope: bool  # positions have three parts: frame, row, column
    prompt: PromptRule | None  # None: the model has no prompts with pictures
    video: VideoRule | None = None


def read_image_info(folder: Path, options: Mapping[str, Any] | None = None) -> ImageInfo | None:
    """None: the model sees no images. `options`: fields of the image processor that replace those of the files.

    Raises UnsupportedModel for a family that is not known, BadCheckpoint, or InvalidOption for a field that this model
    does not have.
    """
    config = _load(folder / "config.json")
    named = config.get("model_type")
    config = config.get("vlm_config") or config
    if not isinstance(config.get("vision_config"), dict):
        return None
    if named not in FAMILIES:
        raise UnsupportedModel(
            f"{folder.name}: images of the family {named} are not supported; these are: {', '.join(FAMILIES)}"
        )
    whole = _load(folder / "processor_config.json", optional=True)
    nested = whole.get("image_processor")
    processor = nested if isinstance(nested, dict) else _load(folder / "preprocessor_config.json", optional=True)
    if not processor:
        raise BadCheckpoint(
            f"{folder.name} has a part that sees images, and neither processor_config.json nor "
            "preprocessor_config.json; download the model again"
        )
    videos = whole.get("video_processor") or _load(folder / "video_preprocessor_config.json", optional=True)
    words = _load(folder / "tokenizer_config.json", optional=True)
    extra = words.get("extra_special_tokens")
    words = {**words, **(extra if isinstance(extra, dict) else {}), **whole}
    try:
        return _build(str(named), config, processor, videos, words, options or {})
    except InvalidOption:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if options:
            raise InvalidOption(f"mm_processor_kwargs {dict(options)!r:.200} cannot be used: {error!r}") from None
        raise BadCheckpoint(
            f"{folder.name}: the image processor's files or vision_config lack a field or have a wrong one: {error!r}"
        ) from None


def _load(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        found = load_json(path)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download the model again")
    return found


class _Fields:
    """The fields of a processor: of several sources the first that has one."""

    def __init__(self, kind: str, options: Mapping[str, Any], *sources: Mapping[str, Any]) -> None:
        self.kind = kind
        self._options = options
        self._sources = (options, *sources)
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        self._read.add(name)
        found = (source[name] for source in self._sources if source.get(name) is not None)
        return next(found, None)

    def number(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            raise ValueError(f"{name} is {value!r:.100}, not a positive integer")
        return int(value)

    def sides(self, name: str) -> tuple[int, int]:
        value = self.get(name)
        return (value, value) if isinstance(value, int) else (int(value["height"]), int(value["width"]))

    def areas(self) -> tuple[int, int]:
        """The bounds of the area, which `size` calls edges."""
        self._read |= {"size", "min_pixels", "max_pixels"}
        bounds: dict[str, list[Any]] = {"min_pixels": [], "max_pixels": []}
        for source in self._sources:
            size = source.get("size") or {}
            for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                bounds[name] += [source.get(name), size.get(edge), size.get(name)]
        least, most = (next(each for each in found if each is not None) for found in bounds.values())
        if not 0 < least <= most:
            raise ValueError(f"the area of an image is at least {least} and at most {most}")
        return int(least), int(most)

    def colour(self, name: str) -> tuple[Any, Any, Any]:
        value = self.get(name)
        red, green, blue = value if isinstance(value, list | tuple) else (value, value, value)
        return red, green, blue

    def check_options(self) -> None:
        if unknown := sorted(set(self._options) - self._read):
            raise InvalidOption(
                f"mm_processor_kwargs has {', '.join(unknown)}, which {self.kind} does not have; it has "
                f"{', '.join(sorted(self._read))}"
            )


def _build(
    named: str,
    config: dict[str, Any],
    processor: dict[str, Any],
    videos: dict[str, Any],
    words: dict[str, Any],
    options: Mapping[str, Any],
) -> ImageInfo:
    family = FAMILIES[named]
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or family.processor)
    kind = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if named == "llava" and kind == "PixtralImageProcessor":
        family = FAMILIES["pixtral"]
    if kind not in PROCESSORS:
        raise UnsupportedModel(f"the image processor {kind} is not supported; these are: {', '.join(PROCESSORS)}")
    fields = _Fields(kind, options, family.forced, processor, PROCESSORS[kind], SHARED)
    for switch in ("do_resize", "do_rescale", "do_convert_rgb"):
        if not fields.get(switch):
            raise UnsupportedModel(f"{kind} with {switch}: false is not supported; only true is")
    filters: dict[int, Literal["lanczos", "bilinear", "bicubic"]] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
    if (resample := fields.get("resample")) not in filters:
        raise UnsupportedModel(f"{kind} resizes by filter {resample!r}; 1 (Lanczos), 2 (bilinear) and 3 (bicubic) run")
    vision = config["vision_config"]
    patch, merge = _patch_and_merge(family, config, vision)
    frames = int(vision.get("temporal_patch_size") or 2) if family.has_frames else 1
    expected = {"merge_size": merge, "temporal_patch_size": frames, "encoder_patch_size": patch}
    if kind != "PixtralImageProcessor" and not family.is_merged_early:  # Pixtral's is that of tokens
        expected["patch_size"] = patch
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{name} is {fields.get(name)} for the image processor and {value} in config.json")
    normalises = bool(fields.get("do_normalize"))
    info = ImageInfo(
        family=named,
        size=_read_size(kind, fields, config, patch, merge),
        filter=filters[resample],
        rescale=float(fields.get("rescale_factor")),
        mean=fields.colour("image_mean") if normalises else (0.0, 0.0, 0.0),
        std=fields.colour("image_std") if normalises else (1.0, 1.0, 1.0),
        patch=patch,
        merge=merge,
        frames=frames,
        channels_last=family.channels_last,
        in_blocks=family.in_blocks,
        attention=_attention(family, config),
        mrope=family.mrope,
        prompt=_read_prompt(family, config, words),
        video=_read_video(family, config, videos, words, patch * merge, frames),
    )
    fields.check_options()
    return msgspec.convert(msgspec.to_builtins(info), ImageInfo)  # checks the types of all fields


def _patch_and_merge(family: FamilyOfImages, config: dict[str, Any], vision: dict[str, Any]) -> tuple[int, int]:
    """The side of a patch, and how many to each side become one token."""
    vision = vision.get("sam_config") or vision
    patch = vision.get("patch_size") or family.patch
    patch = int(patch[0] if isinstance(patch, list) else patch)
    if family.merge == "mm_tokens_per_image":
        per_side = int(vision.get("image_size") or 224) // patch
        merge = per_side / math.sqrt(int(config.get("mm_tokens_per_image") or 256))
    elif family.merge == "downsample_ratio":
        merge = 1 / float(config.get("downsample_ratio") or 0.5)
    elif isinstance(family.merge, str):
        merge = float(vision.get(family.merge) or config.get(family.merge) or family.usual_merge)
    else:
        merge = family.merge
    if merge != int(merge) or merge < 1 or patch < 1:
        raise ValueError(f"{merge} patches of {patch} pixels to each side become one token")
    if family.is_merged_early:  # the patches are those of the tokens
        return patch * int(merge), 1
    return patch, int(merge)


def _attention(family: FamilyOfImages, config: dict[str, Any]) -> Literal["causal", "images", "prompt"]:
    if family.attention != "vision":
        return family.attention
    text = config.get("text_config") or {}
    return "images" if text.get("use_bidirectional_attention") == "vision" else "causal"


def _read_size(kind: str, fields: _Fields, config: dict[str, Any], patch: int, merge: int) -> ImageSize:
    match kind:
        case "Qwen2VLImageProcessor":
            return SmartSize(patch * merge, *fields.areas())
        case "Glm4vImageProcessor" | "Glm46VImageProcessor":
            # the bounds count the frames of a patch
            return SmartSize(patch * merge, *fields.areas(), frames=fields.number("temporal_patch_size"), small="scale")
        case "PaddleOCRVLImageProcessor":
            return SmartSize(patch * merge, *fields.areas(), small="round")
        case "Gemma3ImageProcessor":
            crops = PanAndScan(
                fields.number("pan_and_scan_min_crop_size"),
                fields.number("pan_and_scan_max_num_crops"),
                float(fields.get("pan_and_scan_min_ratio_to_activate")),
            )
            return StretchedSize(*fields.sides("size"), crops if fields.get("do_pan_and_scan") else None)
        case "Gemma4ImageProcessor" | "Gemma4UnifiedImageProcessor":
            tokens = fields.number("max_soft_tokens")
            if tokens not in (70, 140, 280, 560, 1120):
                raise ValueError(f"max_soft_tokens is {tokens}, not 70, 140, 280, 560 or 1120")
            return BudgetSize(patch * merge, tokens)
        case "PixtralImageProcessor":
            return FittedSize(int(fields.get("size")["longest_edge"]), patch * merge)
        case "Idefics3ImageProcessor" | "SmolVLMImageProcessor":
            tile = int(fields.get("max_image_size")["longest_edge"])
            return SplitSize(int(fields.get("size")["longest_edge"]), tile, bool(fields.get("do_image_splitting")))
        case "GotOcr2ImageProcessor":
            most = fields.number("max_patches") if fields.get("crop_to_patches") else 1
            return TiledSize(*fields.sides("size"), fields.number("min_patches"), most)
        case "LlavaOnevisionImageProcessor":
            tile, width = fields.sides("size")
            if tile != width:
                raise ValueError(f"tiles of {tile} x {width} pixels are not square")
            most_tiles = int(str(config.get("vision_aspect_ratio") or "anyres_max_9").rpartition("_")[2])
            pinpoints = tuple((int(height), int(width)) for height, width in fields.get("image_grid_pinpoints"))
            red, green, blue = (int(255 * value) for value in fields.colour("image_mean"))
            return PinpointSize(tile, pinpoints, most_tiles, (red, green, blue))
        case "Lfm2VlImageProcessor":
            unit = (patch * merge) ** 2
            least, most = fields.number("min_image_tokens"), fields.number("max_image_tokens")
            area = most * unit * float(fields.get("max_pixels_tolerance"))
            whole = SmartSize(patch * merge, least * unit, most * unit, small="clamp")
            tiles = (fields.number("min_tiles"), fields.number("max_tiles"))
            if not fields.get("do_image_splitting"):
                tiles = (1, 1)
            return SmartTiledSize(fields.number("tile_size"), *tiles, bool(fields.get("use_thumbnail")), area, whole)
        case "DeepseekOcr2ImageProcessor":
            side, tile = fields.sides("size")[0], fields.number("tile_size")
            least, most = fields.number("min_patches"), fields.number("max_patches")
            if not fields.get("crop_to_patches"):
                side, most = tile, 0
            return PaddedSize(side, tile, least, most, fields.colour("background_color"))
        case "Siglip2ImageProcessor":
            return PatchesSize(fields.number("patch_size"), fields.number("max_num_patches"))
        case _:  # CLIP, SigLIP, LLaVA: one size, with or without a crop
            if fields.get("do_pad"):
                raise UnsupportedModel(f"{kind} with do_pad: true is not supported; only false is")
            size = fields.get("size")
            shortest = size if isinstance(size, int) else size.get("shortest_edge")
            if shortest is None:
                return StretchedSize(*fields.sides("size"))
            if not fields.get("do_center_crop"):
                raise UnsupportedModel(f"{kind} with a shortest_edge and without do_center_crop is not supported")
            return CroppedSize(int(shortest), *fields.sides("crop_size"))


def _read_prompt(family: FamilyOfImages, config: dict[str, Any], words: dict[str, Any]) -> PromptRule | None:
    if not family.has_prompt:
        return None
    named = _token_texts(family, words)
    texts = {name: text.format_map(named) for name, text in ({"token": "{image_token}"} | family.prompt).items()}
    token_id = config.get("image_token_id", config.get("image_token_index"))
    fields = {"placeholder": texts["token"], **texts, "token_id": token_id, "crops": family.crops}
    return msgspec.convert(fields, PromptRule)


def _token_texts(family: FamilyOfImages, words: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, by the names that processors have for them."""
    found = {"image_token": "<image>"} | family.tokens
    for name in found:
        value = words.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _read_video(
    family: FamilyOfImages,
    config: dict[str, Any],
    videos: dict[str, Any],
    words: dict[str, Any],
    factor: int,
    frames: int,
) -> VideoRule | None:
    usual = family.video
    if usual is None:
        return None
    fields = _Fields("VideoProcessor", {}, videos, usual)
    by_time = bool(usual["by_time"])
    named = _token_texts(family, words)
    token, start, end = named["video_token"], named["vision_start_token"], named["vision_end_token"]
    # frames of Qwen3-VL share one area, those of Qwen2-VL have it each
    size = SmartSize(factor, *fields.areas())
    if by_time:
        size = SmartSize(factor, *fields.areas(), frames=frames, small="scale")
    samples = fields.get("do_sample_frames") is not False
    return VideoRule(
        placeholders=(f"{start}{token}{end}", token) if by_time else (token,),
        token=token,
        token_id=int(config.get("video_token_id") or 0),
        size=size,
        fps=float(fields.get("fps")) if samples and fields.get("fps") else None,
        least=fields.number("min_frames"),
        most=fields.number("max_frames"),
        by_time=by_time,
        start=start if by_time else "",
        end=end if by_time else "",
        tokens_per_second=float(config["vision_config"].get("tokens_per_second") or usual["tokens_per_second"]),
    )
