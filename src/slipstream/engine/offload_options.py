"""Checks that the weights of a model can be offloaded to host memory."""

from __future__ import annotations

from slipstream.config.model_info import ModelInfo
from slipstream.config.options import Options
from slipstream.errors import InvalidOption


def check_offload(options: Options, info: ModelInfo, device_kind: str, *, is_encoder: bool) -> None:
    """Raises InvalidOption if cpu_offload_gb is set and cannot have an effect."""
    if not options.cpu_offload_gb:
        return
    if device_kind == "cpu":
        raise InvalidOption("cpu_offload_gb is for GPUs: on a CPU the weights are in host memory anyway; remove it")
    if is_encoder:
        raise InvalidOption("cpu_offload_gb is for decoders, and the model is an encoder; remove it")
    if info.backend_folder:
        raise InvalidOption("cpu_offload_gb: transformers places the weights of its modules; remove it")
    if options.tensor_parallel_size > 1:
        raise InvalidOption("cpu_offload_gb is for one rank; set tensor_parallel_size to 1, or remove it")
    if options.enable_sleep_mode:
        raise InvalidOption("cpu_offload_gb and enable_sleep_mode exclude each other; remove one of them")
