"""PlainMtp: what an MTP layer drafts, by a model of transformers in float64."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from causal_oracle import exact_math, norm_in_float64


class PlainMtp:
    """The layer is that of a model of transformers with one layer, which gets its inputs as embeddings."""

    def __init__(self, folder: Path) -> None:
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        config = AutoConfig.from_pretrained(folder)
        self.is_qwen = config.model_type.startswith("qwen")
        root = "mtp." if self.is_qwen else f"model.layers.{config.num_hidden_layers}."
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config.first_k_dense_replace, config._experts_implementation = 0, "eager"
        whole.config._experts_implementation = "eager"
        self.head = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        stored = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        own = {name.removeprefix(root): tensor for name, tensor in stored.items() if name.startswith(root)}
        own |= stacked_experts(own)
        layer, inside = self.head.model.layers[0], "layers.0." if self.is_qwen else ""
        layer.load_state_dict({name: own[inside + name] for name in layer.state_dict()})
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        names = names if self.is_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        self.embed_norm, self.hidden_norm, self.projection, norm = (own[f"{name}.weight"] for name in names)
        self.head.model.norm.weight.data, self.head.lm_head.weight.data = norm, stored["lm_head.weight"]
        self.embedding, self.whole = stored["model.embed_tokens.weight"], whole
        norm_in_float64(whole)
        norm_in_float64(self.head)
        # features for the next position: the output after the last norm, or before it
        (self.head.model.norm if self.is_qwen else layer).register_forward_hook(self._keep)

    def _keep(self, layer, inputs, output) -> None:
        self.made = output[0] if isinstance(output, tuple) else output

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, 1 + weight if self.is_qwen else weight)

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        with exact_math(torch.float64):
            found = self.whole.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
            ids, drafts = tokens[1:], []
            for _ in range(num_drafts):
                embeds = self.norm(self.embedding[ids], self.embed_norm)
                both = torch.cat([embeds, self.norm(found, self.hidden_norm)], -1)
                logits = self.head(inputs_embeds=(both @ self.projection.T)[None], use_cache=False).logits
                drafts.append(int(logits[0, -1].argmax()))
                ids = [*ids, drafts[-1]]
                found = torch.cat([found, self.made.view(-1, found.shape[1])[-1:]])
        return drafts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of single experts as transformers' modules have them: one for all gates and ups, one for all downs."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in tensors:
        root, middle, last = name.partition(".experts.0.")
        if not middle or last == "up_proj.weight":
            continue
        experts = range(sum(other.startswith(f"{root}.experts.") and other.endswith(last) for other in tensors))
        matrices = [tensors[f"{root}.experts.{expert}.{last}"] for expert in experts]
        if last == "gate_proj.weight":
            ups = (tensors[f"{root}.experts.{expert}.up_proj.weight"] for expert in experts)
            matrices = [torch.cat(pair) for pair in zip(matrices, ups, strict=True)]
        stacks[f"{root}.experts.{'gate_up' if last.startswith('gate') else 'down'}_proj"] = matrices
    return {name: torch.stack(matrices) for name, matrices in stacks.items()}
