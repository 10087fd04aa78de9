"""PoolingInfo: how a model's hidden states become vectors, scores and labels.

`read_pooling.py` fills it from a folder; the network's heads, the runner's pooling and the front end read it.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from slipstream.params.pooling import Task

Method = Literal["first", "last", "mean", "max", "mean_sqrt_len", "weightedmean", "all", "step"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

METHODS: tuple[Method, ...] = get_args(Method)

Reduction = Literal["first", "sum", "weighted", "max"]
"""Of a prompt's hidden states: the first one, their sum, their sum weighted by position, their maximum. Results of two
chunks of a prompt can be combined."""

_REDUCTION_OF: dict[Method, Reduction | None] = {
    "first": "first",
    "last": None,
    "mean": "sum",
    "max": "max",
    "mean_sqrt_len": "sum",
    "weightedmean": "weighted",
    "all": None,
    "step": None,
}


def reductions_of(methods: tuple[Method, ...]) -> tuple[Reduction, ...]:
    """The reductions that these methods need, each once. A prompt in several chunks keeps a hidden state for each."""
    kinds = (_REDUCTION_OF[method] for method in methods)
    return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))


class DenseInfo(msgspec.Struct, frozen=True, tag="dense"):
    """A projection after the pooling, in a folder of its own."""

    path: str  # its folder, relative to the model's
    in_features: int
    out_features: int  # of the projection
    bias: bool
    activation: str  # a class of torch.nn, one of `sentence_modules.py`
    per_token: bool = False  # applied to tokens, before any pooling (as in ColBERT)
    residual: bool = False  # the input is added to the output, through another projection if the sizes differ

    @property
    def size(self) -> int:
        """Size of the output."""
        return self.out_features // 2 if self.activation == "GLU" else self.out_features


class LayerNormInfo(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm of vectors after the pooling, in a folder of its own."""

    path: str
    size: int


class UnitNormInfo(msgspec.Struct, frozen=True, tag="unit_norm"):
    """Vectors are normalised before another module. At the end that is `PoolingInfo.normalize`."""


ModuleInfo = DenseInfo | LayerNormInfo | UnitNormInfo


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Preparation of the texts of one side (queries or documents) for late interaction."""

    token_id: int | None = None  # inserted as the second token
    length: int | None = None  # texts are truncated to this many tokens; None: as any text
    filler_id: int | None = None  # pads shorter texts to `filled` tokens, which are all compared
    filled: int = 0
    filler_is_seen: bool = True  # False: fillers attend to the text, and no token attends to them


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model's pooling. The first task is the default."""

    tasks: tuple[Task, ...] = ("embed", "token_embed")
    # for one vector of elements or scores per prompt; the vectors of several methods are concatenated
    methods: tuple[Method, ...] = ("last",)
    include_prompt: bool = True  # False: the tokens of a prompt prefix are not pooled
    is_causal: bool = True  # False: every token attends to the whole prompt, which is computed in one step, uncached
    generates: bool = False  # the model can generate too
    why_no_generation: str = ""  # why it cannot generate, if its architecture's name says that it can
    normalize: bool = True  # vectors have length 1 unless a request says otherwise
    modules: tuple[ModuleInfo, ...] = ()  # applied to a pooled vector, or to tokens, one after another
    embed_size: int  # of a vector, after the modules
    token_size: int  # of a token vector
    truncate_dim: int | None = None  # default size to which vectors are truncated
    cuts_normalized: bool = False  # truncate to truncate_dim after normalisation, so that the result is not normalised
    matryoshka: tuple[int, ...] | Literal["any"] | None = "any"  # sizes a vector may be truncated to; None: none

    num_labels: int = 0
    labels: tuple[str, ...] = ()
    classify_activation: str = "softmax"  # or sigmoid, identity, or a class of torch.nn
    scores_by_modules: bool = False  # the classifier is the modules after the pooling
    yes_no: tuple[int, int] | None = None  # the classifier is the LM head's row of the first id minus the second's
    step_tag_id: int | None = None  # STEP: the token after which a step is scored
    returned_token_ids: tuple[int, ...] = ()  # STEP: the columns to return; empty: all

    # how texts become prompts
    prompts: dict[str, str] = {}  # by name: prefixes of texts
    default_prompt_name: str | None = None
    pair_template: str | None = None  # formats a pair as one text, with {instruction}, {query} and {document}
    instruction: str = ""  # default instruction of the pair template
    lower_case: bool = False  # texts are converted to lower case first
    max_seq_length: int | None = None  # texts are truncated to this many tokens; None: they are not
    has_types: bool = False  # the model has token types: a prompt of token ids may include them
    types_pairs: bool = False  # the tokenizer gives the second text of a pair another type than the first
    similarity: Similarity = "cosine"  # by which score compares vectors

    # late interaction: token vectors that are compared one by one (ColBERT)
    late_interaction: bool = False
    query: Role = Role()
    document: Role = Role()
    skip_token_ids: tuple[int, ...] = ()  # document tokens that are not compared, such as punctuation

    max_active_dims: int | None = None  # number of the largest vocabulary weights that are kept
    sparse_sums: bool = False  # a word's weights in all tokens are added; False: the largest counts
    sparse_logs: int = 1  # how many times log(1 + x) of a word's weight in a token is taken
    sparse_skip_ids: tuple[int, ...] = ()  # tokens without a weight, such as those at the beginning and end of a text

    @property
    def module_sizes(self) -> tuple[int, ...]:
        """Output sizes of the modules' projections."""
        return tuple(module.out_features for module in self.modules if isinstance(module, DenseInfo))
