"""StepLimits: how many requests and tokens a step has at most, by the options, the model and the machine."""

from __future__ import annotations

import msgspec

from slipstream.config.machine import Machine
from slipstream.config.model_info import ModelInfo
from slipstream.config.option_values import positive
from slipstream.config.options import Options
from slipstream.config.pooling_info import PoolingInfo
from slipstream.errors import InvalidOption

DEFAULT_MAX_ITL = 50  # milliseconds
DEFAULT_ROWS = {"cpu": 64, "cuda": 256}  # of one step
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}
SMALL = 512  # hidden size of encoders that a GPU computes faster than the host prepares steps
LARGE_GPU = 64 * 2**30  # bytes of memory beside which the activations of twice as many tokens are small
TILE_ROWS = 128  # of the tiles of large GEMMs


class StepLimits(msgspec.Struct, frozen=True):
    max_num_seqs: int
    given_tokens: int | None  # max_num_batched_tokens, as the user gave it
    usual_tokens: int  # the default
    chunked_prefill: bool  # a prompt may be computed in several steps
    is_encoder: bool  # a prompt is always computed in one step

    def tokens(self, length: int) -> int:
        """Maximum tokens of a step, for requests of up to `length` tokens."""
        given = self.given_tokens
        tokens = max(self.usual_tokens, self.max_num_seqs) if given is None else given
        return max(tokens, length) if self.is_encoder or (given is None and not self.chunked_prefill) else tokens


def choose_step_limits(
    options: Options,
    info: ModelInfo,
    machine: Machine,
    length: int,
    pooling: PoolingInfo | None,
    *,
    is_encoder: bool,
    has_max_itl: bool,
) -> StepLimits:
    """`length`: of the longest request; `has_max_itl`: whether the time between two tokens is bounded."""
    on_cpu = machine.kind == "cpu"
    larger = 2 if is_encoder and not on_cpu and info.hidden_size <= SMALL else 1
    max_num_seqs = positive("max_num_seqs", options.max_num_seqs, larger * DEFAULT_ROWS[machine.kind])
    given = options.max_num_batched_tokens
    if given is not None:
        positive("max_num_batched_tokens", given)
        if max(given, length if is_encoder else 0) < max_num_seqs:  # every running row needs a token per step
            if options.max_num_seqs is not None:
                raise InvalidOption(
                    f"max_num_batched_tokens is {given}, fewer than the {max_num_seqs} requests of max_num_seqs; "
                    "raise the first or lower the second"
                )
            max_num_seqs = given
    # GEMMs, of experts most, are faster with more tokens, and without a bound no request waits for a longer step
    is_unbounded = not has_max_itl and (pooling is None or pooling.generates)
    is_large = machine.kind == "cuda" and machine.total_memory >= LARGE_GPU
    usual_tokens = larger * DEFAULT_TOKENS[machine.kind]
    if is_unbounded and is_large and not is_encoder:
        usual_tokens = _in_waves(2 * DEFAULT_TOKENS[machine.kind], machine.num_multiprocessors)
    return StepLimits(
        max_num_seqs,
        given,
        usual_tokens,
        chunked_prefill=options.enable_chunked_prefill and not is_encoder,
        is_encoder=is_encoder,
    )


def choose_max_itl(options: Options, machine: Machine) -> float | None:
    """In seconds. No bound on a CPU, where prefill is hardly faster per token than decode: small chunks would be
    slow."""
    given = options.max_itl
    if given is None:
        return None if machine.kind == "cpu" else DEFAULT_MAX_ITL / 1000
    if given < 0:
        raise InvalidOption(f"max_itl is {given}; give milliseconds, or 0 for no bound")
    return given / 1000 if given else None


def _in_waves(num_tokens: int, num_multiprocessors: int) -> int:
    """About `num_tokens`: a multiple of a tile of rows for each multiprocessor, so that in GEMMs, which compute tiles
    in waves, the last wave is full."""
    wave = TILE_ROWS * num_multiprocessors
    return max(1, round(num_tokens / wave)) * wave if wave else num_tokens
