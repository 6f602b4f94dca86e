"""Reader of `torch.save`, `pickle.dump`, `np.save` and `np.savez` files, without torch and without running code.

Tensors and arrays stay in the file and come as `Tensor` and `NumpyArray`, which have `numpy()`. Which classes and
functions a pickle may name is in `unpickling.py`.

Formats: torch's zip (`torch/serialization.py`, `_save`), the one before torch 1.6 (`_legacy_save`), which
`pickle.dumps` of a tensor still uses, plain pickles, and numpy's `.npy` (`numpy.lib.format`) and `.npz`.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.containers.archives import ZIP_MAGIC, Archive, release_pages
from trimtab.trace.containers.tensors import NPY_MAGIC, TORCH_DTYPES, NumpyArray, Storage
from trimtab.trace.containers.unpickling import Unpickler

# The first pickle of the format before torch 1.6 is this number.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_SNIFFED_BYTES = 64 << 20


def load(path: Path) -> Any:
    """The content of a file. Its arrays are views of the file, which must not change while they are in use.

    Raises:
        InputError: one line (without the path), if the file has none of these formats, is damaged, or contains anything
            but data.
    """
    try:
        content = _map(path)
    except OSError as error:
        raise InputError(f"can't be read ({error.strerror})") from None
    except ValueError:  # mmap refuses empty files
        raise InputError("an empty file") from None
    return loads(memoryview(content))


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def loads(content: memoryview) -> Any:
    """As `load`, of bytes in memory."""
    try:
        return _load(content)
    except RecursionError:
        raise InputError("nested too deeply") from None


def looks_loadable(path: Path) -> bool:
    """True if the file starts as one of the formats. Never raises."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError:
        return False
    # A safetensors file starts with the length of its header, which may look like a pickle's protocol.
    pickled = start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and start[4:] != b"\0\0\0\0{"
    return pickled or start.startswith((ZIP_MAGIC, NPY_MAGIC))


def mentions(path: Path, *keys: str) -> set[str]:
    """Returns those of the keys that occur in the dump's pickle, or as array names in its `.npz`.

    Searches the bytes of at most the first 64 MiB of the pickle. Never raises: an unreadable file has none.
    """
    if not looks_loadable(path):
        return set()
    try:
        content = _map(path)
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


def _load(content: memoryview) -> Any:
    start = bytes(content[:16])
    if start.startswith(ZIP_MAGIC):
        return _load_zip(Archive(content))
    if start.startswith(NPY_MAGIC):
        return _load_npy(content)
    if start.startswith(_LEGACY_START):
        return _load_legacy(content)
    if start[:1] == b"\x80":
        return _unpickled(content)
    raise InputError("not a file of torch.save, pickle (protocols 2 to 5), np.save or np.savez")


def _unpickled(content: memoryview, load_storage: Callable[[Any], Storage] | None = None) -> Any:
    value = Unpickler(content, _load, load_storage or _no_storage).load()
    release_pages(content)
    return value


def _load_zip(archive: Archive) -> Any:
    main = [name for name in archive.entries if _is_main(name)]
    if not main:
        if not archive.entries or not all(name.endswith(".npy") for name in archive.entries):
            raise InputError("a zip file, but neither of torch.save nor of np.savez")
        return {name.removesuffix(".npy"): _load_npy(archive.view(name)) for name in archive.entries}
    if len(main) > 1:
        raise InputError("a damaged torch file: it has several data.pkl")
    folder = main[0].removesuffix("data.pkl")
    big_endian = f"{folder}byteorder" in archive.entries and bytes(archive.view(f"{folder}byteorder")) == b"big"

    def load_storage(persistent_id: Any) -> Storage:
        dtype, key, count = _storage_facts(persistent_id)
        return Storage(dtype, count, lambda: archive.view(f"{folder}data/{key}"), big_endian)

    if archive.entries[main[0]].compress_type != zipfile.ZIP_STORED:
        raise InputError("a torch file that was compressed since; torch.save does not compress")
    return _unpickled(archive.view(main[0]), load_storage)


def _load_legacy(content: memoryview) -> Any:
    """Magic number, version, system, the value, the names of the storages; then each storage behind its length."""
    storages: dict[str, Storage] = {}

    def load_storage(persistent_id: Any) -> Storage:
        dtype, key, count = _storage_facts(persistent_id)
        if len(persistent_id) == 6 and persistent_id[5] is not None:
            raise InputError("a torch file of before 2020 with views of storages; load it with torch and save again")
        return storages.setdefault(key, Storage(dtype, count, _nothing))

    unpickler = Unpickler(content, _load, load_storage)
    if unpickler.load() != _LEGACY_MAGIC:
        raise InputError("a damaged torch file")
    _version, system, value, keys = (unpickler.load() for _ in range(4))
    at = unpickler.at
    if not isinstance(keys, list):
        raise InputError("a damaged torch file: the names of its storages are missing")
    for key in keys:
        storage = storages.get(key) if type(key) is str else None
        if storage is None:
            raise InputError("a damaged torch file: a storage that nothing refers to")
        start, at = at + 8, at + 8 + storage.count * TORCH_DTYPES[storage.dtype].itemsize
        if at > len(content):
            raise InputError("a truncated torch file: a storage lies beyond its end")
        storage.fetch = lambda start=start, at=at: content[start:at]  # type: ignore[misc]
        storage.big_endian = isinstance(system, dict) and system.get("little_endian") is False
    return value


def _load_npy(content: memoryview) -> NumpyArray:
    array = NumpyArray.of_npy(content)
    if not array.dtype.code.endswith("O"):
        return array
    pickled = _unpickled(array.data)
    if not isinstance(pickled, NumpyArray):
        raise InputError("a damaged .npy array of objects")
    return pickled


def _no_storage(_: Any) -> Storage:
    raise InputError("a damaged pickle: it refers to a storage, but is no torch file")


def _nothing() -> memoryview:
    raise InputError("a damaged torch file: a storage is missing")


def _storage_facts(persistent_id: Any) -> tuple[str, str, int]:
    match persistent_id:
        case ("storage", str(dtype), str(key), _, int(count), *_) if count >= 0 and dtype in TORCH_DTYPES:
            return dtype, key, count
    raise InputError("a damaged torch file: a storage without description")
