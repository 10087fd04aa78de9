"""Commands and flags of other programs, and what does the same here.

The command line suggests them for what it does not know; `scripts/pages` writes them into docs/coming-from.md.
"""

from __future__ import annotations

from slipstream.config.vllm_args import NO_EFFECT, REFUSED, RENAMED

# By program and command; {name} is the first argument that is no flag.
COMMANDS = {
    "vLLM": {
        "complete": 'to complete a text: slipstream generate "TEXT" --no-chat --model MODEL',
    },
    "Ollama": {
        "run": "to talk to a model: slipstream chat --model {name}",
        "pull": "hub models (ORG/NAME) are downloaded when first named, and those that Ollama has pulled run by name: "
        "slipstream chat --model {name}",
        "list": "of a running server: curl 127.0.0.1:8000/v1/models",
        "ps": "for the models and load of a running server: slipstream top",
        "show": "for the configuration and memory of a model: slipstream plan --model {name}",
        "stop": "models stay loaded until their server ends",
        "rm": "files of models are not removed by Slipstream",
        "create": "flags of slipstream serve take the place of a Modelfile",
    },
}  # fmt: skip

# By program: a flag, a variable of the environment or a setting, and the flag here or a sentence.
NAMES = {
    "vLLM": {
        "--uvicorn-log-level": "--log-level",
        "--enable-log-requests": "--log-level info",
        "--disable-log-requests": "requests are logged with --log-level info only",
        "--disable-log-stats": "--status-interval 0",
        "--chat-template-content-format": "a template gets the form that it reads",
        "--response-role": "answers have the role assistant",
        "--enable-prompt-tokens-details": "usage always has cached_tokens",
        "--enable-server-load-tracking": "/load always answers",
        "--enable-request-id-headers": "X-Request-Id always comes back",
        "--return-tokens-as-token-ids": "requests have return_tokens_as_token_ids",
        "--enable-reasoning": "--reasoning-parser",
        "--guided-decoding-backend": "llguidance compiles all grammars",
        "--root-path": "the proxy in front removes the prefix",
        "--middleware": "the server loads no code",
        "--request-rate": "--rate",
        "--base-url": "--url",
    },
    "Ollama": {
        "OLLAMA_HOST": "--host and --port",
        "OLLAMA_MODELS": "is read too",
        "OLLAMA_CONTEXT_LENGTH, num_ctx": "--max-model-len; num_ctx of a request lowers it",
        "OLLAMA_NUM_PARALLEL": "--max-num-seqs",
        "OLLAMA_MAX_QUEUE": "--max-queued-requests",
        "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype",
        "OLLAMA_ORIGINS": "--allowed-origins",
        "OLLAMA_KEEP_ALIVE": "models stay loaded",
        "PARAMETER of a Modelfile": "--override-generation-config",
        "TEMPLATE": "--chat-template",
        "ADAPTER": "--lora-modules, a folder in PEFT's layout",
        "SYSTEM": "a system message in the request",
    },
    "llama.cpp": {
        "-m": "--model",
        "-c": "--max-model-len",
        "--ctx-size": "--max-model-len",
        "-np": "--max-num-seqs",
        "--parallel": "--max-num-seqs",
        "-t": "--num-threads",
        "--threads": "--num-threads",
        "-n": "--max-tokens",
        "--n-predict": "--max-tokens",
        "-hf": "--model ORG/NAME",
        "-ngl": "a GPU runs all layers; --cpu-offload-gb keeps some in host memory",
        "--n-gpu-layers": "a GPU runs all layers; --cpu-offload-gb keeps some in host memory",
        "--cache-type-k": "--kv-cache-dtype",
        "-md": "--speculative-config",
        "--model-draft": "--speculative-config",
        "--jinja": "chat templates always apply",
        "-fa": "attention is always computed in blocks",
    },
    "TEI": {
        "--model-id": "--model",
        "--hostname": "--host",
        "--uds-path": "--uds",
        "--pooling": "--pooling-type",
        "--max-batch-tokens": "--max-num-batched-tokens",
        "--max-batch-requests": "--max-num-seqs",
        "--max-concurrent-requests": "--max-queued-requests",
        "--payload-limit": "--max-body-bytes",
        "--tokenization-workers": "--workers",
        "--huggingface-hub-cache": "--download-dir",
        "--hf-token": "set HF_TOKEN in the environment",
        "--json-output": "--log-format json",
        "--otlp-endpoint": "--otlp-traces-endpoint",
        "--cors-allow-origin": "--allowed-origins",
        "--prometheus-port": "/metrics is on the port of the server",
        "--auto-truncate": "texts are cut where the model's folder has a length; requests have truncate",
        "--default-prompt-name": "the folder's default_prompt_name counts; requests have prompt_name",
    },
}


def command_hint(command: str, name: str) -> str | None:
    """Returns what does the same as a command of another program. `name`: of the model that was given."""
    known = (commands[command] for commands in COMMANDS.values() if command in commands)
    return next((text.format(name=name) for text in known), None)


def flag_hint(flag: str) -> str | None:
    """Returns what to write for a flag of another program, or why there is none."""
    for names in NAMES.values():
        if flag in names:
            return _ours(names[flag])
    argument = flag.lstrip("-").replace("-", "_")
    if argument in RENAMED:
        return _ours("--" + RENAMED[argument].replace("_", "-"))
    if argument in REFUSED:
        return REFUSED[argument][1]
    return f"leave it out: {NO_EFFECT[argument]}" if argument in NO_EFFECT else None


def _ours(text: str) -> str:
    return f"here it is {text}" if text.startswith("--") else text
