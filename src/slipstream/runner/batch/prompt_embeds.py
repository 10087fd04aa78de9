"""Uploads the embeddings that requests bring for tokens of their prompts.

They are part of the step's one upload: `config/buffer_size.py` sizes the buffers for a step whose tokens are all
embedded. Such a step runs eagerly (`GraphPool.size_for`), since the number of embedded tokens differs between steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.contracts.step import EmbedPlan
from slipstream.nn.context import GivenEmbeddings
from slipstream.runner.batch.staging import Upload


def stage_embeds(plan: EmbedPlan, upload: Upload) -> Callable[[], GivenEmbeddings]:
    """Host: write the embeddings to the upload. The returned work is for the device."""
    indices = upload.put(plan.indices.astype(np.int64))
    first = plan.values[0]
    values, target = upload.room(first.dtype, (len(plan.indices), first.shape[1]))
    np.concatenate(plan.values, out=target)
    return lambda: GivenEmbeddings(upload.tensor(indices), upload.tensor(values))
