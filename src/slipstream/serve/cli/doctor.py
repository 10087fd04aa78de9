"""`slipstream doctor`: checks packages and hardware, and finds host waits in a short run."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import slipstream
from slipstream.base.errors import ModelNotFound
from slipstream.checkpoint.locate import INSTALL_DEFAULT, INSTALL_EMBEDDER, default_embedder, locate
from slipstream.config.options import make_options
from slipstream.params.sampling import SamplingParams
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.device.sync_check import Sync


# package -> what it is for; all of them come with `pip install slipstream`
NEEDED = {
    "torch": "runs models",
    "numpy": "arrays on the host",
    "msgspec": "messages and JSON",
    "tokenizers": "text to token ids",
    "safetensors": "reads checkpoints",
    "gguf": "reads quantised GGUF files",
    "jinja2": "chat templates",
    "rich": "progress bars",
}
OPTIONAL = {
    "triton": ("kernels on a GPU", "pip install triton"),
    "huggingface_hub": ("models by hub name", "pip install huggingface_hub"),
}
FOR_GPUS = frozenset(["triton"])
COMPILERS = {  # by the program that installs them
    "apt-get": "apt-get install g++", "dnf": "dnf install gcc-c++", "apk": "apk add g++", "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++", "xcode-select": "xcode-select --install",
}  # fmt: skip
# the requests of the short run, which together use every sampling stage but bad words: these need a tokenizer
RUN = (
    dict(temperature=0.0),
    dict(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, seed=1),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2, min_tokens=4),
    dict(temperature=0.5, logprobs=3, n=2, logit_bias={1: 0.5}),
)
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "vocab_size": 512,
}


class Finding(msgspec.Struct, frozen=True):
    name: str
    found: str
    fix: str | None = None  # the command that installs what is missing
    needed: bool = True  # whether Slipstream cannot run without it


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="check this machine, and find host waits in a short run",
        description="Lists what is installed, what is missing, and the command that installs it. Then runs a few "
        "prompts and reports each call at which the host waited for the device, with its stack. On the CPU it detects "
        "operations that read a value, but not plain memory reads. On CUDA it also detects copies and the driver's "
        "synchronising calls.",
        usage="slipstream doctor [flags]",
        allow_abbrev=False,
    )
    command.add_argument("--no-run", action="store_true", help="skip the short run")
    command.add_argument("--json", action="store_true", help="print a JSON object")
    add_engine_flags(command, leave_out=("model",))
    command.add_argument(
        "--model",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="folder, .gguf file or hub name to run (default: a small model with random weights)",
    )
    command.set_defaults(run=run)
    add_version(commands)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    options = engine_options(args)
    make_options(**options)
    findings = [*check_packages()]
    if not any(finding.fix for finding in findings if finding.name == "torch"):
        findings += check_machine()
    findings += check_tools()
    broken = any(finding.fix and finding.needed for finding in findings)
    syncs: list[Sync] | None = None
    if not args.no_run and not broken:
        syncs = short_run(options, opener)
    if args.json:
        found: dict[str, Any] = {"findings": msgspec.to_builtins(findings)}
        if syncs is not None:
            found["syncs"] = [
                {"what": s.what, "count": s.count, "seconds": s.seconds, "allowed": s.allowed, "stack": s.stack}
                for s in syncs
            ]
        print(json.dumps(found))
    else:
        print_findings(findings)
        if syncs is not None:
            print_syncs(syncs)
    waits = [sync for sync in syncs or () if sync.allowed is None]
    return 1 if broken or waits else 0


def check_packages() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("slipstream", slipstream_line().split()[1])
    yield Finding("python", python, None if sys.version_info >= (3, 11) else "install Python 3.11 or newer")
    yield Finding("platform", platform.platform())
    for name, purpose in NEEDED.items():
        version = installed(name)
        yield Finding(name, version or f"missing ({purpose})", None if version else f"pip install {name}")
    for name, (purpose, line) in OPTIONAL.items():
        version = installed(name)
        if version is None and name in FOR_GPUS and not has_nvidia_gpu():
            continue
        yield Finding(name, version or f"not installed ({purpose})", None if version else line, needed=False)


def has_nvidia_gpu() -> bool:
    """By the driver, also where torch cannot use it."""
    return Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def check_machine() -> Iterator[Finding]:
    import torch

    from slipstream.device.device import detect_machine  # imports torch

    machine = detect_machine("auto")
    gib = f"{machine.free_memory / 2**30:.1f} of {machine.total_memory / 2**30:.1f} GiB free"
    if machine.kind == "cuda":
        yield Finding("device", f"cuda: {torch.cuda.get_device_name()}, {gib}")
    else:
        unused, fix = "", None
        if has_nvidia_gpu() and not torch.cuda.is_available():
            unused, fix = "; torch cannot use the GPU", "check the driver and the container: nvidia-smi"
            if torch.version.cuda is None:
                unused, fix = "; the GPU is not used, torch is built for CPUs", "install a build of torch for CUDA"
        yield Finding("device", f"cpu: {machine.num_threads} threads, {gib}{unused}", fix, needed=False)
    yield Finding("fast dtypes", ", ".join(machine.fast_dtypes))
    from slipstream.ops.gemm.linear.measured import gemv_times
    from slipstream.ops.gemm.low_bit import find_kernel
    from slipstream.ops.platform import native

    kernel = find_kernel()  # compiles them
    yield Finding("C kernels", native.state())
    if times := gemv_times():
        stays = "stay so on the CPU" if times.bfloat16_is_faster else "become float32 on the CPU"
        measured = f"{times.bfloat16 * 1e3:.1f} ms a GEMV, float32 {times.float32 * 1e3:.1f}"
        yield Finding("bfloat16 weights", f"{stays} ({measured})")
    yield Finding("low-bit GEMM", kernel.name if kernel else "none for this machine: quantised files run dequantised")


def check_tools() -> Iterator[Finding]:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    fix = next((line for program, line in COMPILERS.items() if shutil.which(program)), "install g++")
    yield Finding("compiler", compiler or "none (compiles C++ kernels)", None if compiler else fix, needed=False)
    try:
        yield Finding("default model", str(locate(None).path))
    except ModelNotFound:
        yield Finding("default model", "not installed", INSTALL_DEFAULT, needed=False)
    try:
        yield Finding("default embedder", str(default_embedder().path))
    except ModelNotFound:
        yield Finding("default embedder", "not installed", INSTALL_EMBEDDER, needed=False)


def short_run(options: dict[str, Any], opener: OpenLLM) -> list[Sync]:
    """Returns the host waits of a few prompts, without those of loading the model."""
    from slipstream.device.sync_check import watch  # imports torch

    with tempfile.TemporaryDirectory() as folder:
        if "model" not in options:
            (Path(folder) / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
            options = {"model": folder, "load_format": "dummy"} | options
        # depth 0 on the CPU: steps in another thread cannot be watched from here
        usual = {"skip_tokenizer_init": True, "max_model_len": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 8}
        on_cpu = options.get("device") == "cpu" or not _has_cuda()
        if on_cpu:
            usual["depth"] = 0
        llm = opener(**(usual | options))
        with closing(llm):
            prompts = [[1 + (number * 7 + index) % 100 for index in range(12)] for number in range(len(RUN))]
            params = [SamplingParams(max_tokens=8, ignore_eos=True, **one) for one in RUN]
            with watch(cpu=on_cpu) as log:
                llm.generate(prompts, params, use_tqdm=False)
    return [*log.found, *log.allowed]


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        print(f"{finding.name:<20}{finding.found}")
        if finding.fix:
            print(f"{'':<20}-> {finding.fix}")


def print_syncs(syncs: list[Sync]) -> None:
    waits = [sync for sync in syncs if sync.allowed is None]
    allowed = f", {len(syncs) - len(waits)} allowed" if len(syncs) > len(waits) else ""
    print(f"{'waits of a run':<20}{len(waits) or 'none'}{allowed}")
    for sync in syncs:
        print(f"  {sync}")


# `slipstream version`: shows installed versions, from package metadata, without importing torch.

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf")


def add_version(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "version", help="show versions", description="Shows the versions of Slipstream, Python and its packages."
    )
    command.set_defaults(run=show_versions)


def show_versions(args: argparse.Namespace, opener: OpenLLM) -> int:
    print(slipstream_line())
    print(f"python {platform.python_version()}")
    print(f"platform {platform.platform()}")
    for name in PACKAGES:
        print(f"{name} {installed(name) or 'not installed'}")
    return 0


def slipstream_line() -> str:
    return f"slipstream {slipstream.__version__}"


def installed(name: str) -> str | None:
    """Returns the version of a package without importing it."""
    from importlib import metadata  # slow to import, and only needed here

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
