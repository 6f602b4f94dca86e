"""Pickles as data: the standard unpickler, to which every class and function that a pickle names is one of ours.

Classes of frameworks become `OpaqueObject`s, a few functions are replaced by functions here, and all others are refused
by name. Nothing handed out can be changed by a pickle: its BUILD calls `__setstate__`, which every class here has.

False sizes and endless work are not refused here; `formats/bounded_import.py` limits memory and time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.containers.archives import BufferFile
from trimtab.trace.containers.tensors import (
    STORAGES,
    TORCH_DTYPES,
    DType,
    Jagged,
    LatinBytes,
    NumpyArray,
    Sealed,
    Storage,
    Tensor,
    buffer_of,
)
from trimtab.trace.message_text import clip

_RENAMED_MODULES = (("__builtin__", "builtins"), ("copy_reg", "copyreg"), ("numpy._core", "numpy.core"))
# Data classes: a pickle of one is read as the bare values that it holds.
_FRAMEWORKS = ("slime", "miles", "verl", "recipe", "nemo_rl", "sglang", "tensordict", "omegaconf")
_PLAIN_CLASSES = {
    "argparse.Namespace", "types.SimpleNamespace", "decimal.Decimal", "fractions.Fraction", "uuid.UUID",
    "uuid.SafeUUID", "builtins.bool", "builtins.float", "builtins.int", "builtins.str", "builtins.object",
    "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "datetime.timezone", "pathlib.Path",
    "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePath", "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath", "torch.Tensor", "torch._C.TensorBase", "torch.nn.parameter.Parameter",
    "torch._dynamo.decorators._DimRange", "torch.nested._internal.nested_tensor.NestedTensor", "numpy.bool",
    "numpy.bool_", *(f"numpy.{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
}  # fmt: skip
_LONGEST_NAME = 512
# Text of an array's bytes is longer in memory as text and bytes than as text.
_LARGE = 1 << 16


class OpaqueObject:
    """An object of a known data class, as the values that it was pickled with; the class has its full `name`.

    `state["x"]` reads as the attribute `x`, if state is a dictionary; `items` and `entries` are what a class derived
    from dict or list holds.
    """

    __slots__ = ("args", "entries", "items", "state")
    name = ""
    args: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    entries: list[Any]

    def __new__(cls, *args: Any, **_: Any) -> OpaqueObject:
        made = super().__new__(cls)
        made.args, made.state, made.items, made.entries = args, None, {}, []
        return made

    def __setstate__(self, state: Any) -> None:
        # A class with __slots__ pickles (dict or None, slots) as its state.
        if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
            state = {**(state[0] or {}), **state[1]}
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def extend(self, entries: list[Any]) -> None:
        self.entries += entries

    def append(self, entry: Any) -> None:
        self.entries.append(entry)

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        raise AttributeError(name)


class Function(Sealed):
    """A function of ours in place of one that a pickle names."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _Dictionary(dict[Any, Any]):
    """A dictionary of a class of its own; its attributes are not used."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """Reads one pickle after another from a buffer.

    Args:
        content: the buffer.
        load: reads a file within the file.
        load_storage: maps a persistent id to its storage.
    """

    def __init__(
        self, content: memoryview, load: Callable[[memoryview], Any], load_storage: Callable[[Any], Storage]
    ) -> None:
        self._file = BufferFile(content)
        super().__init__(self._file)
        self._load, self._load_storage = load, load_storage

    @property
    def at(self) -> int:
        """Where the next pickle starts."""
        return self._file.at

    def load(self) -> Any:
        """The next pickle's value. Raises InputError if it is damaged, or holds anything but data."""
        try:
            return super().load()
        except InputError:
            raise
        except (EOFError, IndexError):
            reason = "it is truncated or damaged"
        except MemoryError:
            # Whether the memory was only claimed is not known. Initialised again, nothing is held any more.
            super().__init__(self._file)
            reason = "it takes more memory than its reader may; if it is not damaged, save it in smaller parts"
        except (ArithmeticError, AttributeError, LookupError, pickle.UnpicklingError, TypeError, ValueError) as error:
            reason = f"it is damaged ({clip(str(error))})"
        raise InputError(f"not a readable pickle: {reason}")

    def find_class(self, module: str, name: str) -> Any:
        """The replacement of a class or function that a pickle names.

        Raises:
            InputError: for all other names, so no code runs.
        """
        for old, new in _RENAMED_MODULES:
            module = module.replace(old, new)
        full_name = f"{module}.{name}"
        if full_name == "torch.storage._load_from_bytes":
            return Function(lambda data: self._load(buffer_of(data)))
        if full_name in FUNCTIONS:
            return FUNCTIONS[full_name]
        if module == "torch" and name in TORCH_DTYPES:
            return name
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if full_name in _PLAIN_CLASSES or module.split(".")[0] in _FRAMEWORKS:
            return _class(full_name)
        raise _not_data(f"an object of class {clip(full_name)!r}")

    def persistent_load(self, persistent_id: Any) -> Storage:
        return self._load_storage(persistent_id)


def _not_data(what: str) -> InputError:
    return InputError(
        f"holds {what}, which is not data; nothing of it was run. Save tensors, arrays, numbers and strings only"
    )


@cache
def _class(full_name: str) -> type[OpaqueObject]:
    if len(full_name) > _LONGEST_NAME:
        raise InputError("not a readable pickle: it names a class of endless length")
    return type(full_name, (OpaqueObject,), {"__slots__": (), "name": full_name})


def _nested_class(outer: Any, name: Any) -> type[OpaqueObject]:
    is_class = isinstance(outer, type) and issubclass(outer, OpaqueObject)
    if is_class and type(name) is str and outer.name.split(".")[0] in _FRAMEWORKS:
        return _class(f"{outer.name}.{name}")
    raise _not_data("a call of 'builtins.getattr'")


def _reconstructed(cls: type[OpaqueObject], _base: Any, state: Any) -> OpaqueObject:
    return cls(state)


def _encode(text: str, coding: Any) -> Any:
    if coding not in ("latin1", "latin-1"):
        raise InputError(f"a damaged pickle: bytes as {clip(str(coding))}")
    return LatinBytes(text) if len(text) > _LARGE else text.encode("latin-1")


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if type(dtype) is not DType or type(data) is not bytes:
        raise TypeError("a number without dtype")
    return NumpyArray((), dtype, data).numpy().item()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> NumpyArray:
    if order != "K" or axes is None:
        return NumpyArray(shape, dtype, data, "F" if order == "F" else "C")
    # The buffer is in memory order; `axes` is the order of axes.
    if sorted(axes) != list(range(len(shape))):
        raise ValueError("an array whose axes are none")
    return NumpyArray(shape, dtype, data, "C", tuple(axes))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    return _typed_tensor(storage, offset, shape, strides, None, None, getattr(storage, "dtype", None))


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if type(storage) is not Storage or type(offset) is not int or type(shape) is not tuple or type(dtype) is not str:
        raise TypeError("a tensor without storage")
    return Tensor(storage, dtype, offset, shape, strides if type(strides) is tuple else ())


def _rebuilt(function: Any, _cls: Any, args: Any, _state: Any) -> Any:
    if type(function) is not Function or type(args) is not tuple:
        raise TypeError("a tensor that is made of none")
    return function(*args)


def _jagged(facts: Any) -> Jagged:
    parts = facts["values"], facts["offsets"], facts.get("lengths")
    if not all(isinstance(part, Tensor) for part in parts[: 2 if parts[2] is None else 3]):
        raise TypeError("a nested tensor that is made of none")
    return Jagged(*parts)


def _list(items: Any = None, *_: Any) -> Any:
    return [] if items is None else items


_MADE: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": lambda data=b"", *_: data,
    "builtins.complex": complex,
    "builtins.getattr": _nested_class,
    # The content of sets is not used.
    "builtins.set": _list,
    "builtins.frozenset": _list,
    "builtins.list": _list,
    "collections.deque": _list,
    "builtins.dict": _Dictionary,
    "collections.OrderedDict": _Dictionary,
    "collections.defaultdict": lambda _=None: _Dictionary(),
    "collections.Counter": lambda items=(): _Dictionary(items),
    "builtins.slice": lambda *_: None,
    "builtins.range": lambda *_: None,
    "copyreg._reconstructor": _reconstructed,
    "numpy.core.multiarray._reconstruct": lambda *_: NumpyArray(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": NumpyArray,
    "numpy.dtype": lambda code, *_: DType(code if type(code) is str else "?unknown"),
    "torch.Size": lambda size=(): size,
    "torch.device": lambda kind, index=None: kind,
    "torch.serialization._get_layout": lambda name: name,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": _rebuilt,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
}
FUNCTIONS = {name: Function(function) for name, function in _MADE.items()}
