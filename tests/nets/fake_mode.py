"""A FakeTensorMode for engines whose weights and caches are real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# autograd's record of what a view is a view of: a tensor gets one once only, so shared ones get none
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class NoValues(FakeTensorMode):
    """Replaces each real tensor that an operation reads by a fake one, the same one every time, and returns what an
    earlier operation on tensors of the same shapes and types returned.

    FakeTensorMode does both too (`allow_non_fake_inputs`, a cache of shapes), but its keys and new tensors take four
    fifths of the time of these tests. Tensors without values can be shared as long as none changes its shape in place.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[torch.Tensor, FakeTensor]] = {}  # the real tensor is kept: its id is not reused
        self._results: dict[Any, Any] = {}  # of operations; the place of an argument that is returned itself
        self._is_converting = False
        self._guard: Any = None

    def __enter__(self) -> NoValues:
        self._guard = torch._C._ExcludeDispatchKeyGuard(_VIEWS)
        self._guard.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._guard.__exit__(*error)
        self._known.clear()

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._replace(args), {name: self._replace(value) for name, value in (kwargs or {}).items()}
        if self._is_converting:
            return super().__torch_dispatch__(func, types, args, kwargs)
        assert torch.Tag.inplace_view not in func.tags, f"{func} changes the shape of a tensor that may be shared"
        given = (*args, *kwargs.values())
        try:
            key = (func, *kwargs, *map(_describe, given))
            result = self._results[key]
        except TypeError:  # an argument that cannot be part of a key
            return super().__torch_dispatch__(func, types, args, kwargs)
        except KeyError:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            place = next((place for place, each in enumerate(given) if each is result), None)
            self._results[key] = result if place is None else _Place(place)
            return result
        return given[result] if type(result) is _Place else result

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self._fake(value)
        return type(value)(map(self._replace, value)) if type(value) in (tuple, list) else value

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        if id(tensor) not in self._known:
            self._is_converting = True
            try:
                self._known[id(tensor)] = tensor, self.from_tensor(tensor)
            finally:
                self._is_converting = False
        return self._known[id(tensor)][1]


class _Place(int):
    """Of an argument of an operation."""


def _describe(value: Any) -> Any:
    """All of a value that a result's shape and type depend on, as part of a key."""
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    if type(value) in (tuple, list):
        return tuple(map(_describe, value))
    return type(value), value  # 1 == 1.0 == True


NO_VALUES = NoValues()  # one for all tests: they run the same operations
