"""Hostile files: no code runs, false sizes take no memory or time, and damaged files are refused."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.pickled_dumps import load, saved
from trimtab import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.allowed_globals import AllowedGlobals
from trimtab.trace.containers.pickles import Budget, Unpickler
from trimtab.trace.containers.tensors import Jagged, NumpyArray, Tensor


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
    "getattr": lambda mark: Call(getattr, os, "system"),
    "subprocess": lambda mark: Call(subprocess.Popen, ["touch", str(mark)]),
    "import": lambda mark: Call(__import__, "antigravity"),
    "nested": lambda mark: {"samples": [{"metadata": {"x": [Call(os.system, f"touch {mark}")]}}]},
    "torch.load": lambda mark: Call(torch.load, str(mark)),
    "torch.hub": lambda mark: Call(torch.hub.load, "a/b", "c"),
    "numpy.load": lambda mark: Call(np.load, str(mark)),
    "codecs": lambda mark: Call(__import__("codecs").encode, "x", "rot13"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 5])
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    mark = tmp_path / "mark"
    hostile = HOSTILE[name](mark)
    if name == "getattr" and protocol == 5:
        hostile = Call(getattr, Path, "write_text")
    elif name == "getattr":
        hostile = Call(getattr, Call, "x")
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


def tensor_program(size: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, count: int = 4) -> bytes:
    """A torch file whose tensor has any given shape; the storage has four elements."""
    content = saved(torch.arange(4))
    source = zipfile.ZipFile(io.BytesIO(content))

    class Claim:
        def __reduce__(self) -> Any:
            arguments: Any = (Stored(), offset, size, strides, False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    class Stored:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            return ("storage", torch.LongStorage, "0", "cpu", count) if isinstance(thing, Stored) else None

    program = io.BytesIO()
    Pickler(program, 2).dump(Claim())
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, program.getvalue() if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


def test_tensors_larger_than_their_storage_are_refused() -> None:
    assert np.array_equal(load(tensor_program((2, 2), (2, 1))).numpy(), [[0, 1], [2, 3]])
    for claim in [
        tensor_program((5,), (1,)),
        tensor_program((1 << 40,), (1,), count=1 << 40),
        tensor_program((4,), (1,), offset=1),
        tensor_program((4,), (1,), offset=-1),
        tensor_program((2,), (-1,), offset=3),
        tensor_program((1 << 30,), (0,)),
        tensor_program((2, 2), (1,)),
        tensor_program((-1,), (1,)),
        tensor_program((1 << 62, 1 << 62), (0, 0)),
        tensor_program((0, 1 << 62), (1, 1)),
        tensor_program((1,) * 40, (1,) * 40),
    ]:
        with pytest.raises(InputError):
            load(claim).numpy()


HUGE = 1 << 60
BOMBS = {
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b"x.",
    "binbytes8": b"\x80\x05\x8e" + struct.pack("<Q", HUGE) + b"x.",
    "binbytes": b"\x80\x05B" + struct.pack("<I", (1 << 32) - 1) + b"x.",
    "binunicode8": b"\x80\x05\x8d" + struct.pack("<Q", HUGE) + b"x.",
    "long4": b"\x80\x05\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "long4 that is there": b"\x80\x05\x8b" + struct.pack("<i", 1 << 20) + b"x" * (1 << 20) + b".",
    "frame": b"\x80\x05\x95" + struct.pack("<Q", HUGE),
    "memo": b"\x80\x04Nr"
    + struct.pack("<I", (1 << 32) - 1)
    + b"0"
    + b"Nr"
    + struct.pack("<I", 1 << 31)
    + b"j\0\0\0\0.",
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
    "call of data": b"\x80\x04\x8c\x01a)R.",
    "array": pickle.dumps(np.arange(1000)).replace(struct.pack("<H", 1000), struct.pack("<H", 65000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_false_sizes_take_no_memory_and_time(name: str) -> None:
    start = time.perf_counter()
    tracemalloc.start()
    try:
        value = load(BOMBS[name])
        if name == "array":
            value.numpy()
        # What is well-formed may be read.
        assert name in ("lists in lists", "tuples in tuples")
    except InputError as error:
        assert "\n" not in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert time.perf_counter() - start < 5


def test_shared_lists_are_not_expanded() -> None:
    """Forty nested lists of two references each stand for 2^41 numbers; reading them takes no time."""
    value: Any = [1, 2]
    for _ in range(40):
        value = [value, value]
    start = time.perf_counter()
    again = load(pickle.dumps({"samples": [{"rollout_routed_experts": value, "tokens": value}]}))
    from trimtab.trace.formats.slime import records_of_samples

    with pytest.raises(InputError):
        list(records_of_samples(again["samples"]))
    as_key: Any = ()
    for _ in range(60):
        as_key = (as_key, as_key)
    # Hashing such a key takes 2**60 steps.
    program = pickle.dumps([as_key, {}])[:-1]
    assert load(program + b"N.") is None
    content = b"\x80\x04})\x94" + b"h\x00\x86\x94".replace(b"h\x00", b"2") * 60 + b"K\x01s."
    assert load(content) == {}
    assert time.perf_counter() - start < 5


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
    tracemalloc.start()
    for claimed in (2 << 30, 100):
        changed = content.replace(struct.pack("<I", 64 << 20), struct.pack("<I", claimed))
        with pytest.raises(InputError, match=r"claims|unpacked"):
            load(changed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


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
    # The numbers of entries and bytes that the last record claims.
    assert load(whole[:-14] + struct.pack("<HH", 60_000, 60_000) + whole[-10:]) == 1
    for claimed in (1 << 10, 1 << 24, 1 << 31):
        with pytest.raises(InputError, match=r"damaged.*zip file: its list of entries"):
            load(whole[:-10] + struct.pack("<I", claimed) + whole[-6:])


FLOODS = r"""
import os, resource, sys
from trimtab import InputError
from trimtab.trace.containers import torch_files
text = b"X" + (60000).to_bytes(4, "little") + b"a" * 60000
floods = {
    "dictionaries": lambda: b"}" * 4_100_000,
    "memo": lambda: b"N" + b"".join(b"r" + n.to_bytes(4, "little") for n in range(4_100_000)),
    "entries": lambda: b"}" + b"".join(b"(J" + n.to_bytes(4, "little") + b"Nu" for n in range(1_500_000)),
    "encoded": lambda: text + b"q\x00c_codecs\nencode\nq\x01" + b"h\x01h\x00X\x06\0\0\0latin1\x86R" * 100_000,
    "sizes": lambda: b"(" + b"K\x01" * 1_000_000 + b"tq\x00ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 100_000,
}
for name, flood in floods.items():
    if os.fork():
        assert os.wait()[1] == 0
        continue
    content = b"\x80\x02" + flood() + b"."
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    try:
        torch_files.loads(memoryview(content))
        message = "read"
    except InputError as error:
        message = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(name, grown >> 20, message, sep="|", flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_pickles_with_too_many_objects_are_refused() -> None:
    result = subprocess.run([sys.executable, "-c", FLOODS], capture_output=True, text=True, check=True, timeout=300)
    lines = [line.split("|") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["dictionaries", "memo", "entries", "encoded", "sizes"]
    for name, grown_mib, message in lines:
        assert int(grown_mib) < 1000, (name, grown_mib)
        assert "holds more than" in message or name == "sizes"


def test_pickles_with_too_many_numbers_are_refused() -> None:
    program = memoryview(b"\x80\x02(" + b"M\xff\xff" * 1_000_000 + b"l.")
    unpickler = Unpickler(program, lambda module, name: None, lambda _: None, Budget(program_bytes=1 << 20))
    with pytest.raises(InputError, match="holds more than"):
        unpickler.load()
    assert len(unpickler._stack) < 400_000


def random_program(rng: np.random.Generator) -> bytes:
    """Valid opcodes and allowed names in random order."""
    allowed = AllowedGlobals(Budget(), torch_files.loads).table
    names = [*allowed, "torch.LongStorage", "slime.types.Sample", "torch.int16"]
    values = [
        b"N",
        b"K\x03",
        b"J\xff\xff\xff\xff",
        b"\x88",
        b"}",
        b"]",
        b")",
        b"C\x08" + bytes(8),
        b"\x8c\x02i2",
        b"\x8c\x01K",
    ]
    values += [b"\x8c\x06latin1", b"\x8c\x01<", b"X\x01\x00\x01\x00" + b"a" * 65537, b"G" + bytes(8)]
    joins = [
        b"\x85",
        b"\x86",
        b"\x87",
        b"a",
        b"s",
        b"b",
        b"R",
        b"R",
        b"R",
        b"\x81",
        b"\x92",
        b"Q",
        b"2",
        b"0",
        b"\x94",
        b"h\x00",
    ]
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
                value.unbind()
        except InputError as error:
            assert "\n" not in str(error)
    assert read > 50
