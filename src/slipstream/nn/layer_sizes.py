"""Upper bounds of the memory that the layers of a model allocate in a step, from their shapes."""

from __future__ import annotations

from slipstream.checkpoint.model_info import ModelSizes
from slipstream.nn.shapes import AttentionShape, DenseAndExpertsShape, ExpertShape, FeedShape, LayerShape, MlpShape


def sizes_of(layers: tuple[LayerShape, ...], hidden_size: int, on_cpu: bool) -> ModelSizes:
    """An upper bound of what these layers take beside the hidden states."""
    mixers = [mixer for layer in layers for mixer in layer.mixers if isinstance(mixer, AttentionShape)]
    feeds = [feed for layer in layers for feed in _feeds(layer.feed)]
    # mixers side by side hold their projections at once
    widths = [sum(mixer.elements_per_token(on_cpu) for mixer in layer.mixers) for layer in layers]
    # gate and up, and their product; a sparse gate has copies of its own
    widths += [(7 if feed.sparsity else 3) * feed.size for feed in feeds if isinstance(feed, MlpShape)]
    experts = [_expert_elements(feed, hidden_size, on_cpu) for feed in feeds if isinstance(feed, ExpertShape)]
    groups = {
        (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window, mixer.soft_cap, mixer.sinks)
        for mixer in mixers
        if mixer.has_own_site
    }
    return ModelSizes(
        widest=max(widths, default=0) + max(experts, default=0) + _beside(layers, hidden_size),
        per_step=max((sum(mixer.elements_per_step(on_cpu) for mixer in layer.mixers) for layer in layers), default=0),
        rotary=3 * sum({mixer.rope: mixer.head_dim for mixer in mixers}.values()),
        split_sums=sum(num_heads * head_dim + 2 * num_heads for num_heads, _, head_dim, *_ in groups),
        keys=max((mixer.num_kv_heads * mixer.head_dim for mixer in mixers), default=0),
        scored_heads=max(
            (mixer.num_heads for mixer in mixers if mixer.soft_cap or mixer.sinks or mixer.latent), default=0
        ),
    )


def _feeds(feed: FeedShape | None) -> tuple[MlpShape | ExpertShape, ...]:
    if isinstance(feed, DenseAndExpertsShape):
        return (feed.mlp, feed.experts)
    return () if feed is None else (feed,)


def _beside(layers: tuple[LayerShape, ...], hidden_size: int) -> int:
    """Elements of a token that stay while all layers run: its inputs of each layer, and its other streams."""
    inputs = sum(layer.layer_input.size for layer in layers if layer.layer_input is not None)
    streams = max((layer.altup.num_streams for layer in layers if layer.altup is not None), default=0)
    # the output of a mixer is held while the feed beside it runs
    parallel = hidden_size if any(layer.parallel != "no" for layer in layers) else 0
    # inputs are a sum of two, of which each has a copy; streams are predicted, corrected and held
    return 4 * inputs + 5 * streams * hidden_size + parallel


def _expert_elements(feed: ExpertShape, hidden_size: int, on_cpu: bool) -> int:
    """Router scores of a token and the rows of its chosen experts, and the shared expert's."""
    router = 8 * feed.num_experts  # logits, float32 scores, their sum with a bias, and groups
    shared = 0 if feed.shared is None else 3 * feed.shared.size
    latent = 2 * feed.latent_size  # the inputs of the experts, and their sum
    hidden_size = feed.latent_size or hidden_size
    if on_cpu:  # sorted inputs, outputs in both orders, weighted in float32; gate, up and product of one expert
        return router + shared + latent + feed.router.top_k * 6 * hidden_size + 3 * feed.size
    return router + shared + latent + feed.router.top_k * (2 * hidden_size + feed.size)
