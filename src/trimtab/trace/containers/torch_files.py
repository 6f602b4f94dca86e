"""Reader of `torch.save`, `pickle.dump`, `np.save` and `np.savez` files, without torch and without running code.

Tensors and arrays stay in the file and come as `Tensor` and `NumpyArray`, which have `numpy()`. Classes of the
frameworks whose dumps we read come as `OpaqueObject` values. Any other class or function is refused by name.

Formats: torch's zip (`torch/serialization.py`, `_save`), the one before torch 1.6 (`_legacy_save`), which
`pickle.dumps` of a tensor still uses, plain pickles, and numpy's `.npy` (`numpy.lib.format`) and `.npz`.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import InputError
from trimtab.trace.containers.archives import ZIP_MAGIC, Archive
from trimtab.trace.containers.pickles import AllowedGlobal, Budget, LargeText, OpaqueObject, Unpickler
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
    stored,
)
from trimtab.trace.message_text import clip

NPY_MAGIC = b"\x93NUMPY"
# The first pickle of the format before torch 1.6 is this number.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# A torch file within a `DataProto` within a torch file; no framework nests deeper.
_DEEPEST = 4
_SNIFFED_BYTES = 64 << 20

# Data classes: a pickle of one is read as the bare values that it holds.
_FRAMEWORKS = ("slime", "miles", "verl", "recipe", "nemo_rl", "sglang", "tensordict", "omegaconf")
_PLAIN_CLASSES = {
    "argparse": {"Namespace"},
    "builtins": {"bool", "float", "int", "str"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "types": {"SimpleNamespace"},
    "uuid": {"UUID", "SafeUUID"},
    "torch._dynamo.decorators": {"_DimRange"},
    "torch.nested._internal.nested_tensor": {"NestedTensor"},
    "torch": {"Tensor"},
    "torch._C": {"TensorBase"},
    "torch.nn.parameter": {"Parameter"},
}
_NUMPY_SCALARS = {"bool_", "bool", *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64))}


def load(path: Path) -> Any:
    """The content of a file. Its arrays are views of the file, which must not change while they are in use.

    Raises:
        InputError: one line (without the path), if the file has none of these formats, is damaged, or contains anything
            but data.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise InputError("an empty file")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"can't be read ({error.strerror})") from None
    return loads(memoryview(content))


def loads(content: memoryview) -> Any:
    """As `load`, from memory."""
    try:
        return _Loader().load(content)
    except RecursionError:
        raise InputError("nested too deeply") from None
    except MemoryError:
        raise InputError("needs more memory than there is") from None


def looks_loadable(path: Path) -> bool:
    """Does the file start as one of the formats? Never raises."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError:
        return False
    return start.startswith((ZIP_MAGIC, NPY_MAGIC)) or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")


def mentions(path: Path, *keys: str) -> set[str]:
    """Returns those of the keys that occur in the dump's pickle, or as array names in its `.npz`.

    Searches the bytes of at most the first 64 MiB of the pickle. Never raises: an unreadable file has none.
    """
    if not looks_loadable(path):
        return set()
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start, end = 0, len(content)
        if content[:4] == ZIP_MAGIC:
            entries = Archive(memoryview(content)).entries
            pickled = [entry for name, entry in entries.items() if _is_main(name)]
            if not pickled:
                return {key for key in keys if f"{key}.npy" in entries}
            start = pickled[0].header_offset
            end = start + pickled[0].compress_size + (1 << 16)
        end = min(end, start + _SNIFFED_BYTES, len(content))
        return {key for key in keys if any(content.find(text, start, end) >= 0 for text in _pickled_texts(key))}
    except (InputError, OSError, ValueError):
        return set()


def _pickled_texts(key: str) -> list[bytes]:
    text = key.encode()
    return [b"\x8c" + bytes([len(text)]) + text, b"X" + struct.pack("<I", len(text)) + text]


def _is_main(name: str) -> bool:
    return name == "data.pkl" or (name.count("/") == 1 and name.endswith("/data.pkl"))


class _Loader:
    """One file and the files inside it, which share the budget of objects."""

    def __init__(self) -> None:
        self._budget = Budget()
        self._depth = 0
        self._allowed_globals = self._list_allowed_globals()

    def load(self, content: memoryview) -> Any:
        if self._depth == _DEEPEST:
            raise InputError("nested too deeply")
        self._depth += 1
        try:
            start = bytes(content[:16])
            if start.startswith(ZIP_MAGIC):
                return self._load_zip(Archive(content))
            if start.startswith(NPY_MAGIC):
                return self._load_npy(content)
            if start.startswith(_LEGACY_START[:14]):
                return self._load_legacy(content)
            if start[:1] == b"\x80":
                return self._unpickler(content, _no_storage).load()
        finally:
            self._depth -= 1
        raise InputError("not a file of torch.save, pickle (protocols 2 to 5), np.save or np.savez")

    def _unpickler(self, content: memoryview, load_storage: Any) -> Unpickler:
        return Unpickler(content, self._find, load_storage, self._budget)

    def _load_zip(self, archive: Archive) -> Any:
        main = [name for name in archive.entries if _is_main(name)]
        if not main:
            if not archive.entries or not all(name.endswith(".npy") for name in archive.entries):
                raise InputError("a zip file, but neither of torch.save nor of np.savez")
            return {name.removesuffix(".npy"): self._load_npy(archive.view(name)) for name in archive.entries}
        if len(main) > 1:
            raise InputError("a damaged torch file: it has several data.pkl")
        folder = main[0].removesuffix("data.pkl")
        big_endian = f"{folder}byteorder" in archive.entries and bytes(archive.view(f"{folder}byteorder")) == b"big"

        def load_storage(persistent_id: Any) -> Storage:
            dtype, key, count = _storage_facts(persistent_id)
            return Storage(dtype, count, lambda: archive.view(f"{folder}data/{key}"), big_endian)

        if archive.entries[main[0]].compress_type != zipfile.ZIP_STORED:
            raise InputError("a torch file that was compressed since; torch.save does not compress")
        return self._unpickler(archive.view(main[0]), load_storage).load()

    def _load_legacy(self, content: memoryview) -> Any:
        """Magic number, version, system, the value, the names of the storages; then each storage behind its length."""
        storages: dict[str, Storage] = {}

        def load_storage(persistent_id: Any) -> Storage:
            dtype, key, count = _storage_facts(persistent_id)
            if len(persistent_id) == 6 and persistent_id[5] is not None:
                raise InputError(
                    "a torch file of before 2020 with views of storages; load it with torch and save again"
                )
            return storages.setdefault(key, Storage(dtype, count, _nothing))

        unpickler = self._unpickler(content, load_storage)
        if unpickler.load() != _LEGACY_MAGIC:
            raise InputError("a damaged torch file")
        _version, system, value, keys = (unpickler.load() for _ in range(4))
        big_endian = isinstance(system, dict) and system.get("little_endian") is False
        at = unpickler.at
        if not isinstance(keys, list):
            raise InputError("a damaged torch file: the names of its storages are missing")
        for key in keys:
            storage = storages.get(key) if type(key) is str else None
            if storage is None:
                raise InputError("a damaged torch file: a storage that nothing refers to")
            item_size = 2 if storage.dtype == "bfloat16" else np.dtype(DTYPES[storage.dtype]).itemsize
            start, at = at + 8, at + 8 + storage.count * item_size
            if at > len(content):
                raise InputError("a truncated torch file: a storage lies beyond its end")
            storage.fetch = stored(content[start:at])
            storage.big_endian = big_endian
        return value

    def _load_npy(self, content: memoryview) -> NumpyArray:
        header = io.BytesIO(bytes(content[: 1 << 14]))
        try:
            version = np.lib.format.read_magic(header)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            shape, fortran, dtype = read(header)
        except (
            Exception
        ) as error:  # numpy passes the header to Python's tokenizer and parser, which can raise any exception
            raise InputError(f"a damaged .npy array ({clip(str(error))})") from None
        data: Any = content[header.tell() :]
        if dtype.hasobject and dtype.kind == "O":
            pickled = self._unpickler(data, _no_storage).load()
            if not isinstance(pickled, NumpyArray):
                raise InputError("a damaged .npy array of objects")
            return pickled
        return NumpyArray(shape, DType(dtype.str), data, "F" if fortran else "C")

    def _find(self, module: str, name: str) -> Any:
        """The replacement of a class or function that a pickle names. All other names are refused, so no code runs."""
        top = module.split(".")[0]
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        module = module.replace("numpy._core", "numpy.core")
        if (module, name) in self._allowed_globals:
            return AllowedGlobal(name, self._allowed_globals[module, name])
        if module == "torch" and name in DTYPES:
            return name
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if top in _FRAMEWORKS:
            return _class(module, name)
        if name in _PLAIN_CLASSES.get(module, ()) or (module == "numpy" and name in _NUMPY_SCALARS):
            return _class(module, name)
        raise InputError(
            f"holds an object of class {clip(f'{module}.{name}')!r}, which is not data; nothing of it was run. "
            "Save tensors, arrays, numbers and strings only"
        )

    def _list_allowed_globals(self) -> dict[tuple[str, str], Any]:
        return {
            ("_codecs", "encode"): self._encode,
            ("builtins", "bytes"): lambda: b"",
            ("builtins", "bytearray"): lambda data=b"": data,
            ("builtins", "complex"): complex,
            ("builtins", "getattr"): _nested_class,
            # Sets become lists: their content is not used, and hashing it can take very long.
            ("builtins", "set"): _list,
            ("builtins", "frozenset"): _list,
            ("collections", "deque"): lambda items=None, _=None: [] if items is None else items,
            ("builtins", "list"): _list,
            ("builtins", "dict"): _dictionary,
            ("builtins", "slice"): lambda *_: None,
            ("builtins", "range"): lambda *_: None,
            ("builtins", "object"): lambda: None,
            ("collections", "OrderedDict"): _dictionary,
            ("collections", "defaultdict"): lambda _=None: {},
            ("collections", "Counter"): lambda items=None: {} if items is None else items,
            ("copyreg", "_reconstructor"): _reconstructed,
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: NumpyArray(),
            ("numpy.core.multiarray", "scalar"): self._scalar,
            ("numpy.core.numeric", "_frombuffer"): _from_buffer,
            ("numpy", "ndarray"): NumpyArray,
            ("numpy", "dtype"): lambda code, *_: DType(code if type(code) is str else "?unknown"),
            ("torch", "Size"): lambda size=(): size,
            ("torch", "device"): lambda kind, index=None: kind,
            ("torch.serialization", "_get_layout"): lambda name: name,
            ("torch._utils", "_rebuild_tensor"): _tensor,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
            ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _jagged,
            ("torch.storage", "_load_from_bytes"): self._storage_from_bytes,
        }

    def _encode(self, text: Any, coding: Any) -> Any:
        if coding not in ("latin1", "latin-1"):
            raise InputError(f"a damaged pickle: bytes as {clip(str(coding))}")
        if type(text) is LargeText:
            return LatinBytes(text)
        self._budget.spend(0, len(text))
        return text.encode("latin-1")

    def _scalar(self, dtype: Any, data: Any = b"") -> Any:
        if type(dtype) is not DType or type(data) is not bytes:
            raise TypeError("a number without dtype")
        self._budget.spend(0, len(data))
        return NumpyArray((), dtype, data).numpy().item()

    def _storage_from_bytes(self, data: Any) -> Any:
        if isinstance(data, LatinBytes):
            self._budget.spend(0, len(data.text.utf8))
        return self.load(buffer_of(data))


def _no_storage(_: Any) -> Storage:
    raise InputError("a damaged pickle: it refers to a storage, but is no torch file")


def _nothing() -> memoryview:
    raise InputError("a damaged torch file: a storage is missing")


def _storage_facts(persistent_id: Any) -> tuple[str, str, int]:
    if type(persistent_id) is not tuple or len(persistent_id) < 5 or persistent_id[0] != "storage":
        raise InputError("a damaged torch file: a storage without description")
    _, dtype, key, _, count = persistent_id[:5]
    if type(dtype) is not str or type(key) is not str or type(count) is not int or count < 0 or dtype not in DTYPES:
        raise InputError("a damaged torch file: a storage without description")
    return dtype, key, count


def _class(module: str, name: str) -> AllowedGlobal:
    full = f"{module}.{name}"
    return AllowedGlobal(full, lambda *args: OpaqueObject(full, args))


def _nested_class(outer: Any, name: Any) -> AllowedGlobal:
    if type(outer) is not AllowedGlobal or type(name) is not str:
        raise InputError("holds a call of 'builtins.getattr', which is not data; nothing of it was run")
    module, _, outer_name = outer.name.rpartition(".")
    if module.split(".")[0] not in _FRAMEWORKS:
        raise InputError("holds a call of 'builtins.getattr', which is not data; nothing of it was run")
    return _class(module, f"{outer_name}.{name}")


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
    if type(storage) is not Storage or type(offset) is not int or type(shape) is not tuple:
        raise TypeError("a tensor without storage")
    return Tensor(storage, storage.dtype, offset, shape, strides if type(strides) is tuple else ())


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
