"""Tiny encoders of `tiny_encoder.py` as GGUF files, converted as llama.cpp's script does. Tensor names are those of the
gguf library's own map."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tiny_gguf_families import add_facts, config_of

ARCHITECTURES = {
    "EuroBertModel": "eurobert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "JinaBertModel": "jina-bert-v2",
    "T5EncoderModel": "t5encoder",
}


def write_encoder_gguf(
    folder: Path,
    fields: Mapping[str, Any] | None = None,
    *,
    gate_apart: bool = False,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """`fields`: more fields of the file, by their whole names: its vocabulary, its pooling. `gate_apart`: JinaBERT's
    gates are tensors of their own, as in older files. `kind`: of the matrices."""
    config = json.loads((folder / "config.json").read_text())
    weights = converted(config, load_file(folder / "model.safetensors"))
    if gate_apart:
        weights = with_gate_apart(weights)
    arch = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config_of(config, "layers")
    )
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    add_facts(writer, arch, config)
    if arch == "t5encoder":
        writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    else:
        writer.add_causal_attention(False)
    for name, value in (fields or {}).items():
        add_field(writer, name, value)
    for name, tensor in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        is_matrix = tensor.dim() == 2 and not any(table in theirs for table in ("position", "types", "attn_rel_b"))
        own = kind if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(tensor.float().contiguous().numpy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, bytes: writer.add_array}
    kinds.get(type(value), writer.add_array)(name, value)


def converted(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the layouts and sizes that the conversion script writes; poolers are left out."""
    found = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    if "Roberta" in config["architectures"][0]:  # rows of the table before that of the first token
        first = config["pad_token_id"] + 1
        config["max_position_embeddings"] -= first
        name = "embeddings.position_embeddings.weight"
        found[name] = found[name][first:]
    return found


def with_gate_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model for code has its gates in the second half, the others in the first."""
    found = dict(weights)
    for name in weights:
        if ".mlp.gated_layers." in name or ".mlp.up_gated_layer." in name:
            first, second = found.pop(name).chunk(2)
            gate, up = (second, first) if "up_gated_layer" in name else (first, second)
            block = name.rsplit(".", 2)[0]
            found |= {f"{block}.gated_layers_w.weight": gate, f"{block}.gated_layers_v.weight": up}
    return found


def unigram_fields(tokenizer: Tokenizer, rows: int, charsmap: bytes) -> dict[str, Any]:
    """The vocabulary of a Unigram tokenizer as the script writes it, with a name for each row of the embedding."""
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    special = tokenizer.get_added_tokens_decoder()
    kinds = [2 if piece == "<unk>" else 3 if number in special else 1 for number, (piece, _) in enumerate(pieces)]
    rest = rows - len(pieces)
    names = [piece for piece, _ in pieces] + [f"[PAD{number}]" for number in range(len(pieces), rows)]
    fields = {
        "model": "t5", "pre": "default", "tokens": names,
        "scores": [float(score) for _, score in pieces] + [-10_000.0] * rest, "token_type": kinds + [5] * rest,
        "precompiled_charsmap": charsmap, "add_space_prefix": True, "remove_extra_whitespaces": True,
    }  # fmt: skip
    ends = {f"{name}_token_id": tokenizer.token_to_id(text) for name, text in NAMED.items()}
    fields |= {name: number for name, number in ends.items() if number is not None}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


NAMED = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<pad>", "mask": "<mask>"}


def precompiled_charsmap(replaced: Mapping[str, str]) -> bytes:
    """SentencePiece's table of replacements: a double-array trie of the keys, then the texts. Each node of this one has
    256 units of its own."""
    texts = b""
    units = {0: 256 << 10}
    blocks = {b"": 256}
    for key, value in replaced.items():
        for end in range(1, len(key.encode()) + 1):
            prefix, whole = key.encode()[:end], end == len(key.encode())
            unit = blocks[prefix[:-1]] ^ prefix[-1]
            block = blocks.setdefault(prefix, 256 * (len(blocks) + 1))
            units[unit] = (unit ^ block) << 10 | (units.get(unit, 0) & 256) | whole << 8 | prefix[-1]
            if whole:
                units[block] = len(texts)
        texts += value.encode() + b"\0"
    size = 256 * (len(blocks) + 1)
    trie = b"".join(units.get(i, 0).to_bytes(4, "little") for i in range(size))
    return len(trie).to_bytes(4, "little") + trie + texts
