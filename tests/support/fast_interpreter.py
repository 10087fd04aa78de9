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
    _make_tensors_of_remembered_shapes()
    _remember_constants()
    _skip_casts_to_the_same_type()


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

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Calls what a builtin wraps: the wrapper only checks that `_semantic` is given."""
        inner = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(package, name, call)

    interpreter._patch_attr = patch_attr


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
    shapes: dict[Any, Any] = {}  # one object for each shape
    make = tl.block_type.__init__

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (*[each.value if isinstance(each, tl.constexpr) else each for each in shape],)
        key = element_ty.name, sizes
        if key not in known:
            make(self, element_ty, shape)
            known[key] = shapes.setdefault(sizes, self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    tl.block_type.__init__ = init


def _make_tensors_of_remembered_shapes() -> None:
    """Each tensor has its shape and size as constants, which the interpreter makes anew for each."""
    make = tl.tensor.__init__
    known: dict[int, tuple[Any, Any, Any]] = {}  # by the object that the types of blocks share
    scalar: list[Any] = []

    def init(self: Any, handle: Any, type: Any) -> None:
        if isinstance(type, tl.block_type):
            found = known.get(id(type.shape))
        else:
            found = scalar[0] if scalar else None
        if found is None:
            make(self, handle, type)
            if isinstance(type, tl.block_type):
                known[id(type.shape)] = type.shape, self.shape, self.numel
            else:
                scalar.append((None, self.shape, self.numel))
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = found

    tl.tensor.__init__ = init


def _remember_constants() -> None:
    """The interpreter makes an array of each number in a kernel each time it is used."""
    semantic = type(interpreter.interpreter_semantic)
    known: dict[Any, Any] = {}
    make = semantic.scalar_constant

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        kind = type(value)
        if dtype is None or not (kind is int or kind is float and value == value):
            return make(self, value, dtype)
        key = value, kind, dtype.name
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    semantic.scalar_constant = scalar_constant


def _skip_casts_to_the_same_type() -> None:
    """Before each operation with two arguments the interpreter looks for their common type and shape, casts and
    broadcasts. Mostly both have them already, or one is a number."""
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    ranges = {"int32": 2**31, "int64": 2**63}
    numbers = {**dict.fromkeys(ranges, (int,)), "fp32": (int, float), "fp64": (int, float)}

    def fits(value: Any, dtype: Any) -> bool:
        """Whether the number takes the type of the tensor beside it."""
        bound = ranges.get(dtype.name)
        return type(value) in numbers.get(dtype.name, ()) and (bound is None or -bound <= value < bound)

    def check_types(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is tl.tensor:
            if type(rhs) is tl.tensor:
                is_address = args and args[0] and type(lhs.dtype) is tl.pointer_type and rhs.dtype.name in ranges
                if is_address or (lhs.dtype.name == rhs.dtype.name and rhs.dtype.name in numbers):
                    return broadcast_value(self, lhs, rhs)
            elif fits(rhs, lhs.dtype):
                return broadcast_value(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        elif type(rhs) is tl.tensor and fits(lhs, rhs.dtype):
            return broadcast_value(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.shape.values:
            return lhs, spread(self, rhs, lhs.type.with_element_ty(rhs.dtype))
        if not lhs.shape.values:
            return spread(self, lhs, rhs.type.with_element_ty(lhs.dtype)), rhs
        return broadcast(self, lhs, rhs)

    def spread(self: Any, scalar: Any, type: Any) -> Any:
        return tl.tensor(self.builder.create_splat(type, scalar.handle), type)

    semantic.binary_op_type_checking_impl = check_types
    semantic.broadcast_impl_value = broadcast_value
