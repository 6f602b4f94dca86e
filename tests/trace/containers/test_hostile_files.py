"""Hostile files: no code runs, false sizes take no memory or time, and damaged files are refused."""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import os
import pickle
import resource
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.pickled_dumps import load, saved
from trimtab import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.tensors import Jagged, NumpyArray, Tensor
from trimtab.trace.containers.unpickling import FUNCTIONS
from trimtab.trace.formats.dump_fields import rows_of


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = {
    "os.system": lambda mark: Call(os.system, f"touch {mark}"),
    "eval": lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"),
    "exec": lambda mark: Call(exec, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Call(open, str(mark), "w"),
    "getattr": lambda mark: Call(getattr, Path, "write_text"),
    "getattr of an instance": lambda mark: Call(getattr, Call(Path, str(mark)), "touch"),
    "subprocess": lambda mark: Call(subprocess.Popen, ["touch", str(mark)]),
    "import": lambda mark: Call(__import__, "antigravity"),
    "torch.load": lambda mark: Call(torch.load, str(mark)),
    "torch.hub": lambda mark: Call(torch.hub.load, "a/b", "c"),
    "numpy.load": lambda mark: Call(np.load, str(mark)),
    "codecs": lambda mark: Call(codecs.encode, "x", "rot13"),
}
NESTED: dict[str, Callable[[Any], Any]] = {
    "bare": lambda value: value, "list": lambda value: [0, [value]], "tuple": lambda value: (0, (value,)),
    "value": lambda value: {"samples": {"metadata": value}}, "key": lambda value: {(0, value): 0},
    "set": lambda value: [{value}], "array": lambda value: [np.array([value, None], object)],
    "argument": lambda value: Call(SimpleNamespace, value), "attribute": lambda value: [SimpleNamespace(samples=value)],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("protocol", [2, 5])
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, name: str, nested: str, protocol: int) -> None:
    mark = tmp_path / "mark"
    hostile = NESTED[nested](HOSTILE[name](mark))
    contents = [pickle.dumps(hostile, protocol), saved(hostile), saved(hostile, _use_new_zipfile_serialization=False)]
    # Within the bytes that a tensor's storage is pickled as.
    contents.append(pickle.dumps(Call(torch.storage._load_from_bytes, contents[0]), protocol))
    for content in contents:
        with pytest.raises(InputError) as refused:
            load(content)
        assert "\n" not in str(refused.value)
        assert name == "codecs" or "nothing of it was run" in str(refused.value)
    assert not mark.exists()


def test_object_arrays_of_npy_run_nothing(tmp_path: Path) -> None:
    array = np.array([None], object)
    array[0] = Call(os.system, f"touch {tmp_path / 'mark'}")
    np.savez(tmp_path / "a.npz", allow_pickle=True, a=array)
    with pytest.raises(InputError, match=r"'(posix|nt)\.system'.*not data"):
        torch_files.load(tmp_path / "a.npz")
    assert not (tmp_path / "mark").exists()


def test_names_in_messages_are_short_and_printable() -> None:
    content = b"\x80\x04\x8c\x03a\nb\x8c\xff" + b"\x1b" * 255 + b"\x93."
    with pytest.raises(InputError) as refused:
        load(content)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_classes_with_endless_names_are_refused() -> None:
    def named(length: int) -> bytes:
        name = b"a" * length
        return b"\x80\x04X" + struct.pack("<I", 4) + b"verl" + b"X" + struct.pack("<I", length) + name + b"\x93."

    assert load(named(500)).__name__ == f"verl.{'a' * 500}"
    with pytest.raises(InputError, match="endless length"):
        load(named(600))


def tensor_program(size: Any, strides: Any, offset: Any = 0, count: int = 4, **changes: Any) -> bytes:
    """A torch file whose tensor has any given shape; the storage has four elements.

    Args:
        changes: the storage or dtype of a tensor that names its dtype.
    """
    storage = object()

    class Claim:
        def __reduce__(self) -> Any:
            facts: Any = (offset, size, strides, False, collections.OrderedDict())
            if changes:
                named = {"storage": storage, "dtype": torch.int64} | changes
                return torch._utils._rebuild_tensor_v3, (named["storage"], *facts, named["dtype"])
            return torch._utils._rebuild_tensor_v2, (storage, *facts)

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            return ("storage", torch.LongStorage, "0", "cpu", count) if thing is storage else None

    program = io.BytesIO()
    Pickler(program, 2).dump(Claim())
    source, target = zipfile.ZipFile(io.BytesIO(saved(torch.arange(4)))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, program.getvalue() if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


def test_tensors_larger_than_their_storage_are_refused() -> None:
    for right in (tensor_program((2, 2), (2, 1)), tensor_program((2, 2), (2, 1), dtype=torch.int64)):
        assert np.array_equal(load(right).numpy(), [[0, 1], [2, 3]])
    for claim in [
        tensor_program((5,), (1,)),
        tensor_program((1 << 40,), (1,), count=1 << 40),
        tensor_program((4,), (1,), offset=1),
        tensor_program((4,), (1,), offset=-1),
        tensor_program((2,), (-1,), offset=3),
        tensor_program((2, 2), (1,)),
        tensor_program((-1,), (1,)),
        tensor_program((1 << 62, 1 << 62), (0, 0)),
        tensor_program((0, 1 << 62), (1, 1)),
        tensor_program((1,) * 40, (1,) * 40),
        tensor_program((2, 2), [2, 1]),
        tensor_program((2, 2), (2, 1.0)),
        tensor_program((2.0, 2), (2, 1)),
    ]:
        with pytest.raises(InputError):
            load(claim).numpy()
    for claim in (
        tensor_program((2, 2), (2, 1), storage=[0, 1, 2, 3]),
        tensor_program((2, 2), (2, 1), dtype=4),
        tensor_program((2, 2), (2, 1), offset=0.0),
        tensor_program([2, 2], (2, 1)),
    ):
        with pytest.raises(InputError):
            load(claim)


HUGE = 1 << 60
BOMBS = {
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b"x.",
    "binbytes8": b"\x80\x05\x8e" + struct.pack("<Q", HUGE) + b"x.",
    "binbytes": b"\x80\x05B" + struct.pack("<I", (1 << 32) - 1) + b"x.",
    "binunicode8": b"\x80\x05\x8d" + struct.pack("<Q", HUGE) + b"x.",
    "long4": b"\x80\x05\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "long4 that is there": b"\x80\x05\x8b" + struct.pack("<i", 1 << 20) + b"x" * (1 << 20) + b".",
    "frame": b"\x80\x05\x95" + struct.pack("<Q", HUGE),
    "memo": b"\x80\x04Nr" + b"\xff" * 4 + b"0Nr" + struct.pack("<I", 1 << 31) + b"j\0\0\0\0.",
    "marks": b"\x80\x04" + b"(" * 100_000 + b".",
    "lists in lists": b"\x80\x04" + b"]" * 30_000 + b"a" * 29_999 + b".",
    "tuples in tuples": b"\x80\x04)" + b"\x85" * 50_000 + b"}\x94" + b"h\x00s.",
    "no end": b"\x80\x04" + b"K\x01" * 100_000,
    "out of band": b"\x80\x05\x97.",
    "extension": b"\x80\x04\x82\x01.",
    "protocol 0": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "instance": b"\x80\x04(ios\nsystem\n.",
    "build on a class": b"\x80\x04ccollections\nOrderedDict\n}b.",
    "persistent": b"\x80\x04K\x01Q.",
    "persistent id as text": b"\x80\x04Pstorage\n.",
    "extension of two bytes": b"\x80\x04\x83\x01\x02.",
    "extension of four bytes": b"\x80\x04\x84\x01\x02\x03\x04.",
    "object": b"\x80\x04(cos\nsystem\no.",
    "call of data": b"\x80\x04\x8c\x01a)R.",
    "array": pickle.dumps(np.arange(1000)).replace(struct.pack("<H", 1000), struct.pack("<H", 65000)),
}


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """A context in which this process may map so many more bytes, as the child process that reads dumps."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", BOMBS)
def test_false_sizes_take_no_memory(name: str) -> None:
    with memory_limit(64 << 20):
        try:
            value = load(BOMBS[name])
            if name == "array":
                value.numpy()
            # What is well-formed may be read.
            assert name in ("lists in lists", "tuples in tuples", "long4 that is there")
        except InputError as error:
            assert "\n" not in str(error)


CHANGED = [
    *FUNCTIONS,
    "torch.storage._load_from_bytes",
    "slime.types.Sample",
    "numpy.dtype called",
    "torch.Size called",
    "collections.OrderedDict called",
    "numpy.core.multiarray._reconstruct called",
    "_codecs.encode called",
]
STATES = {
    "attributes": b"}\x8c\x08__call__Ns\x8c\x05_callNsb",
    "slots": b"N}\x8c\x05_callNs\x8c\x0c__setstate__Ns\x8c\x04nameNs\x86b",
}


@pytest.mark.parametrize("state", STATES)
def test_nothing_that_a_pickle_names_is_changed_by_it(state: str) -> None:
    """BUILD of classes, functions and what they return, with attributes and with slots as the state."""
    for each in CHANGED:
        module, _, name = each.removesuffix(" called").rpartition(".")
        named = f"c{module}\n{name}\n".encode()
        call = {"torch.Size": b")", "_codecs.encode": b"X" + struct.pack("<I", 1 << 17) + b"a" * (1 << 17)}
        made = call.get(each.removesuffix(" called"), b"\x8c\x02i2\x85")
        made = made + b"\x8c\x06latin1\x86" if name == "encode" else made
        program = b"\x80\x04" + named + (made + b"R" if each.endswith("called") else b"") + STATES[state] + b"."
        with contextlib.suppress(InputError):
            load(program)
            # A dictionary takes no attributes, and an array's dtype is checked when it is used.
            assert each.endswith("called")
        again = load(b"\x80\x04" + named + b".")
        if isinstance(again, type):
            assert vars(again)["name"] == "slime.types.Sample"
            assert set(vars(again)) <= {"__slots__", "name", "__module__", "__doc__"}
        else:
            assert callable(again)


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    source = zipfile.ZipFile(io.BytesIO(saved(torch.arange(4))))
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    with pytest.raises(InputError, match="compressed"):
        torch_files.load(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", bytes(64 << 20))
    content = (tmp_path / "b.npz").read_bytes()
    for claimed in (2 << 30, 100):
        changed = content.replace(struct.pack("<I", 64 << 20), struct.pack("<I", claimed))
        with pytest.raises(InputError, match="unpacked"):
            load(changed)


def test_damaged_zips_are_refused() -> None:
    content = saved({"a": torch.arange(1000)})
    place = content.index(torch.arange(100).numpy().tobytes())
    flipped = bytearray(content)
    flipped[place + 100] ^= 1
    with pytest.raises(InputError, match="checksum"):
        load(bytes(flipped))["a"].numpy()
    for end in (10, 100, len(content) // 2, len(content) - 1):
        with pytest.raises(InputError):
            load(content[:end])
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(1, 2))
    whole = plain.getvalue()
    assert load(whole) == 1
    # The entry claims more bytes than the file has.
    sizes = whole.index(b"PK\x01\x02") + 20
    with pytest.raises(InputError, match=r"entry 'a/data\.pkl' lies beyond its end"):
        load(whole[:sizes] + struct.pack("<II", len(whole), len(whole)) + whole[sizes + 8 :])
    # The numbers of entries and bytes that the last record claims.
    assert load(whole[:-14] + struct.pack("<HH", 60_000, 60_000) + whole[-10:]) == 1
    for claimed in (1 << 10, 1 << 24, 1 << 31):
        with pytest.raises(InputError, match=r"damaged.*zip file: its list of entries"):
            load(whole[:-10] + struct.pack("<I", claimed) + whole[-6:])
    # A ZIP64 locator that points outside the file.
    for place in (0, len(whole), 1 << 62):
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, place, 1)
        with pytest.raises(InputError, match=r"damaged.*zip file"):
            load(whole[:-22] + locator + whole[-22:-2].replace(b"\x01\0\x01\0", b"\xff\xff\xff\xff") + b"\0\0")


def random_program(rng: np.random.Generator) -> bytes:
    """Valid opcodes and allowed names in random order."""
    names = [*FUNCTIONS, "torch.storage._load_from_bytes", "torch.LongStorage", "slime.types.Sample", "torch.int16"]
    values = [
        b"N", b"K\x03", b"J\xff\xff\xff\xff", b"\x88", b"}", b"]", b")", b"C\x08" + bytes(8), b"\x8c\x02i2",
        b"\x8c\x01K",
    ]  # fmt: skip
    values += [b"\x8c\x06latin1", b"\x8c\x01<", b"X\x01\x00\x01\x00" + b"a" * 65537, b"G" + bytes(8)]
    joins = [
        b"\x85", b"\x86", b"\x87", b"a", b"s", b"b", b"R", b"R", b"R", b"\x81", b"\x92", b"Q", b"2", b"0", b"\x94",
        b"h\x00",
    ]  # fmt: skip
    parts = [b"\x80\x04"]
    for _ in range(int(rng.integers(3, 25))):
        kind = rng.integers(0, 10)
        if kind < 2:
            module, _, name = names[rng.integers(0, len(names))].rpartition(".")
            parts.append(f"c{module}\n{name}\n".encode())
        elif kind < 5:
            parts.append(values[rng.integers(0, len(values))])
        elif kind < 6:
            few = [values[n] for n in rng.integers(0, len(values), int(rng.integers(0, 8)))]
            parts.append(b"(" + b"".join(few) + b"t")
        else:
            parts.append(joins[rng.integers(0, len(joins))])
    return b"".join(parts) + b"."


def test_random_programs_are_read_or_refused() -> None:
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(3000):
        program = random_program(rng)
        try:
            value = load(program)
            read += 1
            if isinstance(value, NumpyArray | Tensor):
                value.numpy()
            if isinstance(value, Jagged):
                rows_of(value, "rows")
        except InputError as error:
            assert "\n" not in str(error)
    assert read > 50
