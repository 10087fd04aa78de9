"""Recording: the content and the format of a file of the flight recorder.

A file is a magic line and zlib-compressed msgpack. Reading a file decodes known types only and runs no code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from slipstream.base import __version__
from slipstream.base.errors import UserError
from slipstream.base.files import open_regular
from slipstream.config.config import EngineConfig
from slipstream.contracts.codec import decoder, encode
from slipstream.contracts.step import (
    AdapterLoad,
    Admission,
    Bools,
    DrawBias,
    DrawEdits,
    Floats,
    ImageEncoding,
    ImagePlan,
    Ints,
    PoolAdmission,
    SitOut,
    StepPlan,
)
from slipstream.params.sampling import KEPT, SamplingParams, names_for

MAGIC = b"slipstream recording 1\n"
MAX_CONTENT = 2**30  # bytes of a file after decompression
_SAMPLE = 2**16  # bytes at the start and the end of a weight file that the fingerprint reads


class LateRecord(msgspec.Struct, array_like=True):
    """`Late` without the code of logits processors."""

    rows: Ints
    bits: Ints
    bias: DrawBias | None
    num_edits: int  # pieces of code that edited logits; they are not in the file
    offsets: Ints | None = None
    sit_out: SitOut | None = None


class StepRecord(msgspec.Struct, array_like=True):
    plan: StepPlan
    late: LateRecord | None = None
    tokens: Ints | None = None  # None: the step was not committed
    counts: Ints | None = None
    failed: Bools | None = None
    pooled: Floats | None = None  # [ending, NUM_VALUES] the first values of each pooled result
    size: int = 0  # estimated bytes in memory


class Recording(msgspec.Struct):
    slipstream: str  # version
    machine: str
    config: EngineConfig
    fingerprint: str  # of the weight files
    generated: list[Admission]  # of generation requests in use before the first step
    pooled: list[PoolAdmission]  # of pooling requests in use before the first step
    steps: list[StepRecord]
    failure: str | None = None
    redacted: bool = False
    adapters: list[AdapterLoad] = []  # LoRA adapters in slots of the device before the first step
    exchanged: bool = False  # the weights were exchanged while the engine ran: those of the files are others

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        before: list[Admission | PoolAdmission],
        steps: list[StepRecord],
        failure: str | None = None,
        adapters: list[AdapterLoad] | None = None,
        *,
        exchanged: bool = False,
    ) -> Recording:
        return cls(
            slipstream=__version__,
            machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            config=config,
            fingerprint=fingerprint(config),
            generated=[each for each in before if isinstance(each, Admission)],
            pooled=[each for each in before if isinstance(each, PoolAdmission)],
            steps=steps,
            failure=failure,
            adapters=adapters or [],
            exchanged=exchanged,
        )

    def adapters_read(self) -> list[AdapterLoad]:
        """Adapters in slots before the first step that a step reads: the others may be gone from their folders."""
        unused = {load.slot: load for load in self.adapters}
        used = []
        for plan in (step.plan.adapters for step in self.steps):
            if plan is None:
                continue
            for load in plan.loads:
                unused.pop(load.slot, None)
            for slot in set() if plan.slots is None else unused.keys() & set(plan.slots.tolist()):
                used.append(unused.pop(slot))
        return used

    def encode(self, *, redact: bool = False) -> bytes:
        """The content of a file. `redact`: without token ids and texts of requests."""
        content = encode(redacted(self) if redact else self)
        return MAGIC + zlib.compress(content, 1)


def decode(data: bytes, name: str) -> Recording:
    """The recording in the file `name`. Raises if the content is not one."""
    if not data.startswith(MAGIC):
        raise UserError(f"{name} is not a recording of this version; record it again with this version")
    try:
        unpack = zlib.decompressobj()
        content = unpack.decompress(data[len(MAGIC) :], MAX_CONTENT)
        if not unpack.eof:
            raise UserError(f"{name} is cut off, or has more than {MAX_CONTENT} bytes; record fewer steps")
        recording: Recording = decoder(Recording).decode(content)
        return recording
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be read: {error}; record it again with this version") from None


def describe_late(late: DrawEdits) -> LateRecord:
    """Copies the arrays: their owner writes them again. Without masks if they can be computed again."""
    bias = late.bias
    if bias is not None:
        bias = DrawBias(bias.rows.copy(), bias.ids.copy(), bias.values.copy())
    offsets = None if late.offsets is None else late.offsets.copy()
    bits = late.bits.copy() if late.sources is None else late.bits[:0].copy()
    return LateRecord(late.rows, bits, bias, len(late.edits), offsets, late.sit_out)


def redacted(recording: Recording) -> Recording:
    """The same rows, pages and lengths without token ids and texts. A replay compares no tokens then."""
    return msgspec.structs.replace(
        recording,
        generated=[_redacted_admission(each) for each in recording.generated],
        steps=[_redacted_step(step) for step in recording.steps],
        redacted=True,
    )


def _redacted_step(step: StepRecord) -> StepRecord:
    plan, late = step.plan, step.late
    plan = replace(
        plan,
        admitted=tuple(_redacted_admission(each) for each in plan.admitted),
        tokens=np.zeros_like(plan.tokens),
        embeds=None
        if plan.embeds is None
        else replace(plan.embeds, values=tuple(map(np.zeros_like, plan.embeds.values))),
        images=None if plan.images is None else replace(plan.images, encodings=_redacted_images(plan.images)),
        scores=None if plan.scores is None else replace(plan.scores, tokens=np.zeros_like(plan.scores.tokens)),
    )
    if late is not None:
        sit_out = late.sit_out
        if sit_out is not None:
            sit_out = replace(sit_out, tokens=np.zeros_like(sit_out.tokens))
        late = LateRecord(late.rows, np.full_like(late.bits, -1), None, late.num_edits, late.offsets, sit_out)
    tokens = None if step.tokens is None else np.zeros_like(step.tokens)
    return msgspec.structs.replace(step, plan=plan, late=late, tokens=tokens, pooled=None)


def _redacted_images(images: ImagePlan) -> tuple[ImageEncoding, ...]:
    return tuple(replace(each, patches=np.zeros_like(each.patches)) for each in images.encodings)


def _redacted_admission(admission: Admission) -> Admission:
    kept = {name: getattr(admission.params, name) for name in names_for(KEPT)}
    history = None if admission.history is None else np.zeros_like(admission.history)
    return replace(admission, params=SamplingParams(**kept), history=history, bad_words=(), stop_ids=(), thinking=None)


def fingerprint(config: EngineConfig) -> str:
    """Identifies a checkpoint: names and sizes of the weight files, and a hash of the start and end of each."""
    if config.model.load_format == "dummy":
        return f"dummy, seed {config.model.seed}"
    path = Path(config.model.path)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            with open_regular(file) as opened:
                size = opened.seek(0, 2)
                opened.seek(0)
                start = opened.read(_SAMPLE)
                opened.seek(max(0, size - _SAMPLE))
                digest.update(f"{file.name} {size}\n".encode() + start + opened.read(_SAMPLE))
        except OSError:  # the file was moved since it was loaded
            digest.update(f"{file.name} cannot be read\n".encode())
    return digest.hexdigest()


# The folder and the files of the flight recorder, which only their user can read.

SUFFIX = ".slipstream"
MAX_FILES = 8  # recordings kept in the folder


def open_folder(name: str | None) -> Path:
    """The folder for recordings; None: a folder of this user among the temporary files."""
    folder = _private_folder() if name is None else Path(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_private(path: Path, data: bytes) -> Path:
    """Writes a new file that only this user can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    return path


def _private_folder() -> Path:
    """A folder of this user among the temporary files; a new one where another user has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-records-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="slipstream-records-"))
