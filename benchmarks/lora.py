"""Cost of LoRA adapters: the same requests without adapters, with one, and with several mixed in every step.

    python benchmarks/lora.py --model DIR --load-format dummy --adapters 8 --rank 16

Adapters are random, of all linear layers, for models with Llama's tensor names (Llama, Mistral, Qwen2, Qwen3). Prompts
are random token ids; sampling is greedy and ignores the end token. The three cases run in turns after a warm-up; each
line is the best of --repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream import LLM, LoRARequest, SamplingParams


def write_adapter(folder: Path, config: dict[str, int], rank: int, dtype: torch.dtype, seed: int) -> None:
    folder.mkdir()
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_outputs, num_inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * 0.01
            tensors |= {f"{name}.lora_A.weight": a.to(dtype), f"{name}.lora_B.weight": b.to(dtype)}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--adapters", type=int, default=8, help="(default: 8)")
    parser.add_argument("--rank", type=int, default=16, help="(default: 16)")
    parser.add_argument("--requests", type=int, default=64, help="(default: 64)")
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="(default: 128)")
    parser.add_argument("--output", type=int, default=256, metavar="TOKENS", help="(default: 256)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: 3)")
    args = parser.parse_args()
    config = json.loads((Path(args.model) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        loras = []
        for number in range(args.adapters):
            path = Path(folder) / f"adapter-{number}"
            write_adapter(path, config, args.rank, torch.bfloat16, number)
            loras.append(LoRARequest(path.name, number + 1, str(path)))
        with LLM(
            args.model,
            load_format=args.load_format,
            skip_tokenizer_init=True,
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            max_num_seqs=args.requests,
        ) as llm:
            run(llm, loras, args, config["vocab_size"])


def run(llm: LLM, loras: list[LoRARequest], args: argparse.Namespace, vocab_size: int) -> None:
    cases: dict[str, list[LoRARequest | None]] = {
        "no adapter": [None] * args.requests,
        "one adapter": [loras[0]] * args.requests,
        f"{len(loras)} adapters": [loras[number % len(loras)] for number in range(args.requests)],
    }
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    best = dict.fromkeys(cases, 0.0)
    for trial in range(args.repeats + 1):  # the first captures graphs and compiles kernels
        for name, own in cases.items():
            chance = random.Random(f"{trial} {name}")
            prompts = [[chance.randrange(vocab_size) for _ in range(args.prompt)] for _ in own]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False, lora_request=own)
            rate = args.requests * args.output / (time.perf_counter() - start)
            if trial:
                best[name] = max(best[name], rate)
    plain = best["no adapter"]
    for name, rate in best.items():
        print(f"{name:<14}{rate:>10.0f} tokens/s{100 * (rate / plain - 1):>8.1f} %")


if __name__ == "__main__":
    main()
