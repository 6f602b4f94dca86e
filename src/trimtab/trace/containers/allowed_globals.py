"""Classes and functions that a pickle may name, each replaced by a function of ours.

Those of the frameworks whose dumps we read become `OpaqueObject`s. All others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.containers.pickles import AllowedGlobal, LargeText, OpaqueObject
from trimtab.trace.containers.tensors import (
    DTYPES,
    STORAGES,
    DType,
    Jagged,
    LatinBytes,
    NumpyArray,
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
    "uuid.SafeUUID", "builtins.bool", "builtins.float", "builtins.int", "builtins.str", "datetime.date",
    "datetime.datetime", "datetime.time", "datetime.timedelta", "datetime.timezone", "pathlib.Path",
    "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePath", "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath", "torch.Tensor", "torch._C.TensorBase", "torch.nn.parameter.Parameter",
    "torch._dynamo.decorators._DimRange", "torch.nested._internal.nested_tensor.NestedTensor", "numpy.bool",
    "numpy.bool_", *(f"numpy.{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
}  # fmt: skip


class AllowedGlobals:
    """The replacements, for the pickles of one file.

    Args:
        load: reads a file within the file.
    """

    def __init__(self, load: Callable[[memoryview], Any]) -> None:
        self._load = load
        self.table = self._list()

    def find(self, module: str, name: str) -> Any:
        """The replacement of a class or function that a pickle names.

        Raises:
            InputError: for all other names, so no code runs.
        """
        for old, new in _RENAMED_MODULES:
            module = module.replace(old, new)
        full_name = f"{module}.{name}"
        if full_name in self.table:
            return AllowedGlobal(name, self.table[full_name])
        if module == "torch" and name in DTYPES:
            return name
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if full_name in _PLAIN_CLASSES or module.split(".")[0] in _FRAMEWORKS:
            return _class(full_name)
        raise InputError(
            f"holds an object of class {clip(full_name)!r}, which is not data; nothing of it was run. "
            "Save tensors, arrays, numbers and strings only"
        )

    def _list(self) -> dict[str, Any]:
        return {
            "_codecs.encode": _encode,
            "builtins.bytes": lambda: b"",
            "builtins.bytearray": lambda data=b"": data,
            "builtins.complex": complex,
            "builtins.getattr": _nested_class,
            # The content of sets is not used.
            "builtins.set": _list,
            "builtins.frozenset": _list,
            "collections.deque": lambda items=None, _=None: [] if items is None else items,
            "builtins.list": _list,
            "builtins.dict": _dictionary,
            "builtins.slice": lambda *_: None,
            "builtins.range": lambda *_: None,
            "builtins.object": lambda: None,
            "collections.OrderedDict": _dictionary,
            "collections.defaultdict": lambda _=None: {},
            "collections.Counter": lambda items=None: {} if items is None else items,
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
            "torch.storage._load_from_bytes": self._storage_from_bytes,
        }

    def _storage_from_bytes(self, data: Any) -> Any:
        return self._load(buffer_of(data))


def _encode(text: Any, coding: Any) -> Any:
    if coding not in ("latin1", "latin-1"):
        raise InputError(f"a damaged pickle: bytes as {clip(str(coding))}")
    return LatinBytes(text) if type(text) is LargeText else text.encode("latin-1")


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if type(dtype) is not DType or type(data) is not bytes:
        raise TypeError("a number without dtype")
    return NumpyArray((), dtype, data).numpy().item()


def _class(full_name: str) -> AllowedGlobal:
    return AllowedGlobal(full_name, lambda *args: OpaqueObject(full_name, args))


def _nested_class(outer: Any, name: Any) -> AllowedGlobal:
    if type(outer) is AllowedGlobal and type(name) is str and outer.name.split(".")[0] in _FRAMEWORKS:
        return _class(f"{outer.name}.{name}")
    raise InputError("holds a call of 'builtins.getattr', which is not data; nothing of it was run")


def _reconstructed(cls: Any, _base: Any, state: Any) -> OpaqueObject:
    return OpaqueObject(cls.name, (state,))


def _dictionary() -> dict[Any, Any]:
    return {}


def _list(items: Any = None) -> Any:
    return [] if items is None else items


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
    if type(function) is not AllowedGlobal or type(args) is not tuple:
        raise TypeError("a tensor that is made of none")
    return function.make(*args)


def _jagged(facts: Any) -> Jagged:
    values, offsets, lengths = facts["values"], facts["offsets"], facts.get("lengths")
    if not all(isinstance(each, Tensor) for each in (values, offsets, *([] if lengths is None else [lengths]))):
        raise TypeError("a nested tensor that is made of none")
    return Jagged(values, offsets, lengths)
