"""Makes Triton's interpreter faster, in which kernels run where there is no GPU. Results are the same.

Most of its time goes into types and checks, not into arithmetic: see each function.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from triton import language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    _skip_unused_checks()
    _patch_language_once()
    _remember_builtins()
    _remember_dtypes()
    _remember_block_types()


def _skip_unused_checks() -> None:
    """Each sum and product of integers is also computed in int64, to look for overflow. The assertion at the end of
    that check does nothing unless `debug` is set, which it never is."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """The interpreter replaces the functions of `triton.language` for each launch, and once more for each call of one
    jitted function by another, although they are replaced already."""
    patch = interpreter._patch_lang
    patched: set[Any] = set()  # modules, by the launch that runs
    modules_of: dict[Any, frozenset[Any]] = {}

    def patch_lang(function: Any) -> Any:
        modules = modules_of.get(function)
        if modules is None:
            named = function.__globals__.values()
            modules = modules_of[function] = frozenset(each for each in (tl, tl.core) if any(each is x for x in named))
        if modules and modules <= patched:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = patch(function)
        patched.update(modules)
        restore = scope.restore

        def end_launch() -> None:
            patched.clear()
            restore()

        scope.restore = end_launch
        return scope

    interpreter._patch_lang = patch_lang


def _remember_builtins() -> None:
    """At each launch the interpreter looks for builtins among all members of the modules of `triton.language`."""
    known: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in known:
            known[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in known[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not replaced yet
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _remember_dtypes() -> None:
    """The interpreter makes a table of all types each time it looks for the numpy type of one."""
    known: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def _remember_block_types() -> None:
    """The interpreter makes the type of a block for each operation, and checks and prints its shape each time."""
    known: dict[Any, tuple[Any, int, str]] = {}
    make = tl.block_type.__init__

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[each.value if isinstance(each, tl.constexpr) else each for each in shape]
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    tl.block_type.__init__ = init
