"""PoolingInfo: how a model's hidden states become vectors, scores and labels, in our own words.

`read_pooling.py` fills it from a folder; the network's heads, the runner's pooling and the front end all read it.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from slipstream.pooling_params import Task

Method = Literal["first", "last", "mean", "max", "mean_sqrt_len", "weightedmean", "all", "step"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

METHODS: tuple[Method, ...] = get_args(Method)

KeptLine = Literal["first", "sum", "weighted", "max"]
_KEPT_LINES: dict[Method, KeptLine] = {
    "first": "first",
    "mean": "sum",
    "mean_sqrt_len": "sum",
    "weightedmean": "weighted",
    "max": "max",
}


def kept_lines(methods: tuple[Method, ...]) -> tuple[KeptLine, ...]:
    """Lines of a hidden state's size that a prompt cut into chunks carries from one to the next."""
    kinds = (_KEPT_LINES.get(method) for method in methods)
    return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))


class DenseInfo(msgspec.Struct, frozen=True, tag="dense"):
    """A projection behind the pooling, in a folder of its own."""

    path: str  # its folder, relative to the model's
    in_features: int
    out_features: int  # of the product
    bias: bool
    activation: str  # a class of torch.nn, one of `torch_names.py`
    per_token: bool = False  # it is for tokens, before any pooling (as ColBERT's is)
    residual: bool = False  # its input is added to its output, through a product of its own where sizes differ

    @property
    def size(self) -> int:
        """Of what it makes."""
        return self.out_features // 2 if self.activation == "GLU" else self.out_features


class LayerNormInfo(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm of vectors behind the pooling, in a folder of its own."""

    path: str
    size: int


class UnitNormInfo(msgspec.Struct, frozen=True, tag="unit_norm"):
    """Vectors are scaled to length 1 before another module. At the end it is `PoolingInfo.normalize`."""


ModuleInfo = DenseInfo | LayerNormInfo | UnitNormInfo


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What late interaction does to the texts of one side before it reads them."""

    token_id: int | None = None  # stands second
    length: int | None = None  # it is cut to so many tokens; None: as any text
    filler_id: int | None = None  # follows shorter ones until they have `filled` tokens, which are all compared
    filled: int = 0
    filler_is_seen: bool = True  # False: fillers see the text, and nobody sees them


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model's pooling. The first task is what is done when nobody names one."""

    tasks: tuple[Task, ...] = ("embed", "token_embed")
    # of one vector or one row of scores a prompt; of several methods the vectors stand side by side
    methods: tuple[Method, ...] = ("last",)
    include_prompt: bool = True  # False: the tokens of what stands before a text are not pooled
    is_causal: bool = True  # False: every token sees the whole prompt, so prompts are computed whole and not cached
    generates: bool = False  # the model can continue text too
    why_silent: str = ""  # why it cannot, where its architecture's name says that it can
    normalize: bool = True  # vectors have length 1 unless a request says otherwise
    modules: tuple[ModuleInfo, ...] = ()  # what happens to a pooled vector, or to tokens, one after another
    embed_size: int  # of a vector, behind the modules
    token_size: int  # of a token's vector
    truncate_dim: int | None = None  # vectors are cut to this size unless a request says to which
    cuts_normalized: bool = False  # to truncate_dim once they have length 1, which the cut ones have no more
    matryoshka: tuple[int, ...] | Literal["any"] | None = "any"  # sizes a vector may be cut to; None: it may not

    num_labels: int = 0
    labels: tuple[str, ...] = ()
    classify_activation: str = "softmax"  # or sigmoid, identity, or a class of torch.nn
    scores_by_modules: bool = False  # the classifier is the modules behind the pooling
    yes_no: tuple[int, int] | None = None  # the classifier is the LM head's line of the first less that of the second
    step_tag_id: int | None = None  # STEP: the token after which a step is scored
    returned_token_ids: tuple[int, ...] = ()  # STEP: the columns to return; empty is all

    # how texts become prompts
    prompts: dict[str, str] = {}  # by name, put before the text
    default_prompt_name: str | None = None
    pair_template: str | None = None  # a pair as one text, with {instruction}, {query} and {document}
    instruction: str = ""  # of the pair template, when nobody gives one
    lower_case: bool = False  # texts are made lower case first
    max_seq_length: int | None = None  # texts are cut to this many tokens; None: they are not cut
    has_types: bool = False  # the model has token types: a prompt of token ids may bring them
    types_pairs: bool = False  # and the tokenizer gives the second text of a pair another type than the first
    similarity: Similarity = "cosine"  # by which score compares vectors

    # token vectors that are compared one by one (ColBERT)
    late: bool = False
    query: Role = Role()
    document: Role = Role()
    skip_token_ids: tuple[int, ...] = ()  # document tokens that are not compared, as punctuation

    max_active_dims: int | None = None  # of the weights of words so many are kept, the largest
    sparse_skip_ids: tuple[int, ...] = ()  # tokens that get no weight, as those that begin and end a text

    @property
    def module_sizes(self) -> tuple[int, ...]:
        """Numbers that the products of modules make of one line."""
        return tuple(module.out_features for module in self.modules if isinstance(module, DenseInfo))
