"""The cases of the survey: files of vLLM's tests by group, its offline examples, and what is out of scope, and why."""

from __future__ import annotations

import re

_POOLING = "entrypoints/pooling/"
_MODELS = "models/language/pooling/"
GROUPS: dict[str, list[str]] = {
    "llm": [
        f"entrypoints/llm/{name}.py"
        for name in (
            "test_chat", "test_collective_rpc", "test_generate", "test_gpu_utilization", "test_prompt_validation",
            "offline_mode/test_offline_mode",
        )
    ],
    "structured": ["entrypoints/llm/test_struct_output_generate.py"],
    "pooling": [
        f"{_POOLING}{name}.py"
        for name in (
            "basic/test_encode", "classify/test_offline", "embed/test_offline", "reward/test_token_reward_offline",
            "scoring/test_bi_encoder_offline", "scoring/test_cross_encoder_offline",
            "scoring/test_late_interaction_offline", "token_classify/test_offline", "token_embed/test_offline",
        )
    ],
    "pooling models": [
        f"{_MODELS}test_{name}.py"
        for name in (
            "all_pooling_plus_chunked_prefill", "auto_prefix_cache_support", "classification", "embedding",
            "extract_hidden_states", "head_dtype", "multi_vector_retrieval", "multilabel_classification_support",
            "nomic_max_model_len", "pooler_config_init_behaviour", "token_classification", "truncation_control",
        )
    ],
    "samplers": [
        f"samplers/test_{name}.py"
        for name in ("beam_search", "ignore_eos", "logprobs", "no_bad_words", "non_finite_params")
    ],
    "engine": ["v1/engine/test_llm_engine.py", "v1/engine/test_async_llm.py"],
    "sample": ["v1/sample/test_logprobs.py", "v1/sample/test_sampling_params_e2e.py"],
    "general": [
        "v1/e2e/general/test_min_tokens.py", "v1/e2e/general/test_context_length.py",
        *(
            f"detokenizer/test_{name}.py"
            for name in (
                "disable_detokenization", "min_tokens", "stop_reason", "stop_string_while_stop_model_terminates",
                "stop_strings",
            )
        ),
    ],
    "logits processors": ["v1/logits_processors/test_custom_offline.py"],
    "correctness": ["basic_correctness/test_basic_correctness.py"],
    "top": ["test_outputs.py", "test_pooling_params.py", "test_regression.py"],
}  # fmt: skip
EXAMPLES: dict[str, list[str]] = {
    "basic/offline_inference/basic.py": [],
    "basic/offline_inference/chat.py": ["--max-model-len", "512", "--max-tokens", "8"],
    "basic/offline_inference/classify.py": [],
    "basic/offline_inference/embed.py": [],
    "basic/offline_inference/generate.py": ["--max-model-len", "512", "--max-tokens", "8"],
    "basic/offline_inference/score.py": [],
    "deployment/async_llm_streaming.py": [],
    "deployment/llm_engine_example.py": ["--model", "facebook/opt-125m"],
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": [],
    "features/automatic_prefix_caching/prefix_caching_offline.py": [],
    "features/batch_invariance/reproducibility_offline.py": [],
    "features/context_extension/context_extension_offline.py": [],
    "features/data_parallel/data_parallel_offline.py": ["--model", "facebook/opt-125m", "--data-parallel-size", "1"],
    "features/logits_processor/custom.py": [],
    "features/logits_processor/custom_req.py": [],
    "features/logits_processor/custom_req_init.py": [],
    "features/lora/lora_with_quantization_offline.py": [],
    "features/lora/multilora_offline.py": [],
    "features/pause_resume/pause_resume_offline.py": [],
    "features/profiling/run_one_batch_offline.py": [],
    "features/profiling/simple_profiling_offline.py": [],
    "features/prompt_embed/prompt_embed_offline.py": [],
    "features/reset_kv/reset_kv_offline.py": ["--model", "facebook/opt-125m"],
    "features/sharded_state/save_sharded_state_offline.py": [
        "--model", "facebook/opt-125m", "--output", "{work}/sharded"
    ],
    "features/speculative_decoding/extract_hidden_states_offline.py": [],
    "features/speculative_decoding/spec_decode_offline.py": ["--method", "ngram", "--num-prompts", "4"],
    "features/structured_outputs/structured_outputs_offline.py": [],
    "features/torchrun/torchrun_example_offline.py": [],
    "generate/qwen_1m_offline.py": [],
    "observability/metrics/offline.py": [],
    "pooling/embed/embed_jina_embeddings_v3_offline.py": [],
    "pooling/embed/embed_matryoshka_fy_offline.py": [],
    "pooling/reward/sequence_reward_offline.py": [],
    "pooling/reward/token_reward_offline.py": [],
    "pooling/score/qwen3_reranker_offline.py": [],
    "pooling/score/using_template_offline.py": [],
    "pooling/token_classify/ner_offline.py": [],
    "pooling/token_embed/jina_reranker_v3_offline.py": [],
    "pooling/token_embed/multi_vector_retrieval_offline.py": [],
    "rl/skip_loading_weights_in_engine_init.py": [],
    "tool_calling/chat_with_tools_offline.py": [],
}  # fmt: skip
"""Paths under examples/, with the flags of each."""

IMAGES = "images, audio and video"
INTERNALS = "vLLM's internals"
WORDING = "the wording of vLLM's errors"
SEVERAL = "several GPUs"
_OUT = [
    (r"test_require_mm_embeds|passes_multimodal_data|engine_args1-prompt1", IMAGES),
    (r"detokenizer/test_min_tokens|stop_string_while_stop_model", INTERNALS),  # its detokenizer
    (r"TestCorrectDecodedToken|validate_vocab_bounds", INTERNALS),  # its LogprobsProcessor, SamplingParams.verify
    (r"test_pooling_params\.py", INTERNALS),  # PoolingParams.verify and ModelConfig
    (r"test_customize_(aggregated_)?loggers|test_header_dp_rank", INTERNALS),  # its logger manager, its server
    (r"test_failed_model_execution", INTERNALS),  # replaces its executor's method
    (r"test_rejects_custom_logitsprocs.*ENTRYPOINT", INTERNALS),  # looks into its worker
    (r"extract_hidden_states_offline|save_sharded_state|spec_decode_offline\.py", INTERNALS),  # imports its modules
    (r"with_reasoning_matrices", INTERNALS),  # its parser classes
    (r"test_collective_rpc\[(ray-1|.*-2)", SEVERAL),  # skips itself, in a child process
    (r"test_rejects_custom_logitsprocs.*-pooling\]", WORDING),
    (r"test_structured_output\[.*-guidance-hf", WORDING),  # of a grammar that cannot be read; the rest passes
    (r"test_min_tokens_validation|max_context_length_validation\[2048", WORDING),
]
"""Patterns of cases that are out of scope, with the reason."""

TEXT = "text, tokenizer or weights of a published model"
CODE = "code of a checkpoint, which is never run"
WORKS = "works here, where vLLM refuses it"
COLBERT = "ColBERT is scored as it was trained"
FLOAT32 = "scores behind a pooling are always float32"
DEVICE = "reads the memory of a GPU"
NETWORK = "a download from the network"
_KNOWN = [
    (r"torchrun_example|skip_loading_weights", SEVERAL),
    (r"test_no_bad_words|test_stop_(strings|reason)\.py|auto_prefix.*apeach", TEXT),
    (r"internlm2|test_token_reward_offline|token_reward_offline|nomic.*model_info1", CODE),
    (r"jina_(embeddings|reranker)|embed_matryoshka", CODE),
    (r"test_rejects_custom_logitsprocs.*-spec_dec\]", WORKS),
    (r"test_structured_output\[.*-xgrammar-.*(None|config8)\]", WORKS),  # a schema that xgrammar cannot compile
    (r"test_unsupported_tasks\[(token_embed|embed)\]", WORKS),
    (r"test_late_interaction_offline.py::test_(1|n)_to", COLBERT),
    (r"nomic.*model_info0", NETWORK),  # huggingface_hub looks a commit up online
    (r"test_head_dtype", FLOAT32),
    (r"test_regression.py::test_gc$", DEVICE),
    (r"concurrency_limit", "minutes on these CPUs"),
    (
        r"beam_search_structured_output|with_structural_tag|batched_with_non_structured|Meta-Llama.*speculative_config9",
        TEXT,
    ),
    (r"using_template_offline", NETWORK),
    (r"chat_with_tools_offline", TEXT),
    (r"lora_with_quantization", "bitsandbytes quantises at load"),
    (r"qwen_1m_offline", NETWORK),
]
"""Patterns of cases in scope that do not pass, with the reason."""


def out_of_scope(case: str) -> str | None:
    """The reason, or None for a case that should pass."""
    return _first(_OUT, case)


def known_reason(case: str) -> str:
    """The reason why a case in scope does not pass."""
    return _first(_KNOWN, case) or "not examined"


def _first(patterns: list[tuple[str, str]], case: str) -> str | None:
    return next((reason for pattern, reason in patterns if re.search(pattern, case)), None)
