"""A FakeTensorMode for engines whose weights and caches are real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class NoValues(FakeTensorMode):
    """Replaces each real tensor that an operation reads by a fake one, the same one every time.

    FakeTensorMode does so too (`allow_non_fake_inputs`), but it keeps no result of such an operation in its cache and
    describes the tensor again each time, which took half of the time of these tests.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[torch.Tensor, FakeTensor]] = {}  # the real tensor is kept: its id is not reused

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._replace(value) for name, value in (kwargs or {}).items()}
        return super().__torch_dispatch__(func, types, self._replace(args), kwargs)

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self._fake(value)
        return type(value)(map(self._replace, value)) if type(value) in (tuple, list) else value

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, self.from_tensor(tensor)
        return self._known[id(tensor)][1]
