"""The tokenizer class that transformers 5 would use for a folder, and what follows from it.

Only two things follow here: whether the token types of a pair reach the model, and how a folder with only a vocab.txt
splits words. The class is named by tokenizer_config.json, by config.json, or by the model_type.
"""

from __future__ import annotations

from typing import Any

GENERIC = "TokenizersBackend"

# by model_type, if neither file names a class
_REGISTERED = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "nomic_bert": "BertTokenizer", "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer",
    "modernbert": GENERIC,
}  # fmt: skip
# model types whose files name a class that transformers ignores
_NOT_TRUSTED = frozenset(("modernbert",))
BERT_LIKE = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "Electra", "Lxmert", "MobileBert", "SqueezeBert",
    )
)  # fmt: skip
"""Other names of BertTokenizer, except DistilBertTokenizer, which gives no token types."""
_GIVE_TYPES = BERT_LIKE | {"DebertaTokenizer", "DebertaV2Tokenizer", "FNetTokenizer"}


def tokenizer_class(tokenizer_config: dict[str, Any], config: dict[str, Any]) -> str:
    """The name of the class, without "Fast" at its end."""
    kind = str(config.get("model_type"))
    registered = _REGISTERED.get(kind, GENERIC)
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str) or kind in _NOT_TRUSTED:
        return registered
    name = named.removesuffix("Fast")
    return GENERIC if name in ("PreTrainedTokenizer", GENERIC) else name


def gives_types(tokenizer_config: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the token types of a pair are sent to the model."""
    names = tokenizer_config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return tokenizer_class(tokenizer_config, config) in _GIVE_TYPES
