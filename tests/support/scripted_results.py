"""Results of the scripted device: tokens under masks and edits, logprobs, scores of prompts, proposed drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from scripted_row import ScriptedRow
from scripted_tokens import VOCAB, as_token
from slipstream.contracts.step import Admission, DrawEdits, StepLogprobs, StepPlan
from slipstream.params.sampling import MAX_PACKED_LOGPROBS


def pick_token(wanted: int, admission: Admission, late: DrawEdits | None, offset: int = 0) -> int | None:
    """The first token from the wanted one on, unless the step's late data say otherwise; None: all are forbidden.
    `offset`: of the draw within its row."""
    has_mask = late is not None and admission.row in late.rows
    is_processed = bool(getattr(admission, "processed", 0))
    assert has_mask or admission.params.structured_outputs is None, "a mask is missing"
    assert is_processed or has_mask == (admission.params.structured_outputs is not None), "a mask of another row"
    if late is None or not (has_mask or is_processed):
        return wanted
    scores = -((np.arange(VOCAB) - wanted) % VOCAB).astype(np.float64)
    if has_mask:
        masked = late.rows == admission.row
        if late.offsets is not None:
            masked &= late.offsets == offset
        (line,) = masked.nonzero()[0].tolist()
        bits = late.bits[line]
        scores[np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB] == 0] = -np.inf
    if late.bias is not None and admission.row in late.bias.rows:
        index = late.bias.rows.tolist().index(admission.row)
        np.add.at(scores, late.bias.ids[index], late.bias.values[index])
    for edit in late.edits:
        if edit.rows == (admission.row,):
            try:
                scores = edit.run(scores.copy())
            except Exception as error:
                edit.fail(error)
                return None
    best = int(scores.argmax())
    return None if scores[best] == -np.inf else best


def draw_logprobs(tokens: Sequence[int], admissions: Sequence[Admission], k: int) -> StepLogprobs:
    """Logprobs of drawn tokens, whose requests are `admissions`. A token's logprob is the token itself, below zero."""
    logprobs = _logprobs(tokens, range(1, len(tokens) + 1), k)
    num_ids = [len(admission.params.requested_ids) for admission in admissions]
    if any(num_ids):
        asking = [token for token, num in zip(tokens, num_ids, strict=True) if num]
        logprobs = replace(logprobs, requested=-np.array([asking] * max(num_ids), np.float64).T)
    wanted = [admission.params.num_logprobs or 0 for admission in admissions]
    if long := [place for place, num in enumerate(wanted) if num > MAX_PACKED_LOGPROBS]:
        own = _logprobs([tokens[place] for place in long], [place + 1 for place in long], max(wanted))
        logprobs = replace(logprobs, wide=own)
    return logprobs


def _logprobs(tokens: Sequence[int], ranks: Sequence[int], k: int) -> StepLogprobs:
    ids = np.arange(len(tokens) * k, dtype=np.int32).reshape(len(tokens), k)
    return StepLogprobs(-np.array(tokens, np.float64) - 1, np.array(ranks, np.int32), ids, -ids - 0.5)


def score_prompts(
    plan: StepPlan, rows: Mapping[int, ScriptedRow], read: Callable[[ScriptedRow], dict[int, int]]
) -> StepLogprobs | None:
    """The logprob of a prompt token is the token itself, below zero; its rank its position. `read`: the tokens of a row
    by position."""
    if plan.scores is None:
        return None
    num_tokens = plan.num_tokens.tolist()
    row_of = [row for row, num in zip(plan.rows.tolist(), num_tokens, strict=True) for _ in range(num)]
    starts = plan.lengths - plan.num_tokens
    positions = [s + i for s, num in zip(starts.tolist(), num_tokens, strict=True) for i in range(num)]
    ranks = []
    for place, token in zip(plan.scores.indices.tolist(), plan.scores.tokens.tolist(), strict=True):
        state, position = rows[row_of[place]], positions[place]
        assert state.admission.sample == 0 and position + 1 < state.admission.num_prompt_tokens
        if position + 1 < state.length:
            assert as_token(read(state)[position + 1]) == token, "a prompt token is scored at the wrong place"
        ranks.append(position + 1)
    count, k = len(ranks), plan.scores.num_logprobs
    ids = np.arange(count * k, dtype=np.int32).reshape(count, k)
    return StepLogprobs(-plan.scores.tokens.astype(np.float64), np.array(ranks, np.int32), ids, -ids - 0.5)


def proposed_drafts(plan: StepPlan, rows: Mapping[int, ScriptedRow]) -> np.ndarray | None:
    """[sampling, proposed] the drafts of rows that draw; None: the plan returns none."""
    if not plan.returns_drafts:
        return None
    drafts = np.full((np.count_nonzero(plan.num_drawn), plan.num_proposed), -1, np.int32)
    for line, row in zip(drafts, plan.rows[plan.num_drawn > 0].tolist(), strict=True):
        own = rows[row].next_tokens[1 : 1 + plan.num_proposed]
        line[: len(own)] = own
    return drafts
