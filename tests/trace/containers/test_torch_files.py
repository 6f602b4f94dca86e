"""Files of torch, pickle and numpy are read with the values that torch and pickle read."""

from __future__ import annotations

import collections
import datetime
import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.pickled_dumps import load, saved
from trimtab import InputError
from trimtab.trace.containers import torch_files
from trimtab.trace.containers.tensors import DType, Jagged, NumpyArray, buffer_of
from trimtab.trace.containers.unpickling import OpaqueObject
from trimtab.trace.formats.dump_fields import rows_of

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_of_every_dtype(dtype: torch.dtype, legacy: bool) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    content = saved({"a": tensor, "b": tensor[:, 1:, ::2].transpose(0, 2)}, _use_new_zipfile_serialization=not legacy)
    again = load(content)
    assert np.array_equal(again["a"].numpy(), tensor.numpy())
    assert np.array_equal(again["b"].numpy(), tensor[:, 1:, ::2].transpose(0, 2).numpy())
    assert again["a"].numpy().dtype == tensor.numpy().dtype


def test_bfloat16_empty_and_repeated_tensors() -> None:
    values = torch.tensor([1.5, -2.0, 0.0, 3.0e38])
    scalar, empty, repeated = torch.tensor(5), torch.empty((0, 3), dtype=torch.int16), torch.arange(3).expand(1000, 3)
    again = load(saved([values.to(torch.bfloat16), scalar, empty, repeated, torch.nn.Parameter(values)]))
    # numpy has no bfloat16, and no reader needs it.
    with pytest.raises(InputError, match="dtype bfloat16, which is not known"):
        again[0].numpy()
    assert again[1].numpy() == 5
    assert again[2].numpy().shape == (0, 3)
    assert np.array_equal(again[3].numpy(), repeated.numpy())
    assert np.array_equal(again[4].numpy(), values.numpy())


@pytest.mark.parametrize(
    ("codes", "value"),
    [
        ((b"C\x03", b"B\x03\0\0\0", b"\x8e\x03\0\0\0\0\0\0\0"), b"abc"),
        ((b"\x8c\x03", b"X\x03\0\0\0", b"\x8d\x03\0\0\0\0\0\0\0"), "abc"),
        ((b"\x96\x03\0\0\0\0\0\0\0",), bytearray(b"abc")),
        ((b"\x8a\x03", b"\x8b\x03\0\0\0"), int.from_bytes(b"abc", "little")),
    ],
)
def test_values_with_sizes_of_any_width(codes: tuple[bytes, ...], value: Any) -> None:
    for code in codes:
        program = b"\x80\x05" + code + b"abc."
        assert load(program) == pickle.loads(program) == value


def test_nested_tensors() -> None:
    rows = [torch.arange(n * 2).reshape(n, 2) for n in (3, 0, 5)]
    again = load(saved({"n": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}))["n"]
    assert isinstance(again, Jagged)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(rows_of(again, "n"), rows, strict=True))


@pytest.mark.parametrize(("offsets", "lengths"), [([0, 2, 5], None), ([1, 0, 4], None), ([0, 2, 4], [2, 3])])
def test_nested_tensors_outside_their_values_are_refused(offsets: list[int], lengths: list[int] | None) -> None:
    def tensor(values: list[int]) -> NumpyArray:
        return NumpyArray((len(values),), DType("<i8"), np.array(values).tobytes())

    with pytest.raises(InputError, match="outside its values"):
        Jagged(tensor([1, 2, 3, 4]), tensor(offsets), None if lengths is None else tensor(lengths)).bounds()


def test_tensors_of_machines_with_the_other_byte_order() -> None:
    source, target = zipfile.ZipFile(io.BytesIO(saved({"a": torch.arange(300)}))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("byteorder"):
                data = b"big"
            elif "/data/" in name:
                data = np.frombuffer(data, "<i8").astype(">i8").tobytes()
            archive.writestr(name, data)
    assert np.array_equal(load(target.getvalue())["a"].numpy(), np.arange(300))


PLAIN: dict[str, Any] = {
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 62), 1.5, float("inf"), True, False, None],
    "texts": ["", "a", "µ≤🙂", "x" * 300, "\ud800"],
    "bytes": [b"", b"ab", b"\x00\xff" * 200],
    "nested": {"a": [1, (2, (3,), ())], "b": {"c": {}}},
    "shared": [[1, 2]] * 3,
    "ordered": collections.OrderedDict(a=1, b=2),
    "default": collections.defaultdict(list, x=[1]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_of_every_protocol(protocol: int) -> None:
    assert load(pickle.dumps(PLAIN, protocol)) == PLAIN
    assert load(saved(PLAIN)) == PLAIN
    large = bytes(range(256)) * (1 << 15) + b"end"
    assert buffer_of(load(pickle.dumps(large, protocol))) == large


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
def test_numpy_arrays_of_every_protocol_and_version(protocol: int, module: str) -> None:
    arrays = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::2],
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(1, 2, 0),
        np.array(["maths", "code"], object),
        np.array(["maths", "code"]),
        np.empty((0, 4), np.int32),
        np.array(7),
    ]
    content = pickle.dumps([*arrays, np.int64(3), np.float32(1.5), np.str_("x")], protocol)
    if module == "numpy.core":
        for name in (b"numpy._core.multiarray", b"numpy._core.numeric"):
            older = name.replace(b"_core", b"core")
            # Protocol 4 has the length of a string before it.
            content = content.replace(b"\x8c" + bytes([len(name)]) + name, b"\x8c" + bytes([len(older)]) + older)
            content = content.replace(b"c" + name + b"\n", b"c" + older + b"\n")
        assert b"numpy._core" not in content
        if protocol >= 4:
            content = content[:3] + struct.pack("<Q", len(content) - 11) + content[11:]
    again = load(content)
    for before, after in zip(arrays, again, strict=False):
        assert isinstance(after, NumpyArray)
        assert after.numpy().dtype == before.dtype
        assert np.array_equal(after.numpy(), before)
    assert again[-3:] == [3, 1.5, "x"]


def test_tensors_in_plain_pickles_are_read() -> None:
    """`pickle.dumps` of a tensor holds a torch file of the old format within."""
    tensor = torch.arange(1000, dtype=torch.int32).reshape(10, 100)
    for protocol in (2, 5):
        again = load(pickle.dumps({"t": tensor, "u": tensor[::2]}, protocol))
        assert np.array_equal(again["t"].numpy(), tensor.numpy())
        assert np.array_equal(again["u"].numpy(), tensor[::2].numpy())


def test_large_values_stay_in_the_file(tmp_path: Path) -> None:
    """Protocol 2 writes an array's bytes as text, which `torch.save` uses: bytes above 127 take two."""
    array = np.random.default_rng(0).integers(0, 256, (50, 100_000)).astype(np.uint8)
    tensor = torch.arange(1 << 24, dtype=torch.int16)
    torch.save({"text": "µ" * 100_000, "array": array, "list": [array[0], array[1]], "ids": tensor}, tmp_path / "a.pt")
    tracemalloc.start()
    again = torch_files.load(tmp_path / "a.pt")
    ids = again["ids"].numpy()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The array's bytes are copied, the tensor's are not.
    assert peak < 5 * array.nbytes < tensor.numpy().nbytes
    assert again["text"] == "µ" * 100_000
    assert np.array_equal(again["array"].numpy(), array)
    assert np.array_equal(again["list"][1].numpy(), array[1])
    assert np.array_equal(ids, tensor.numpy())
    assert not ids.flags.writeable


def test_npy_and_npz(tmp_path: Path) -> None:
    arrays = {"ids": np.arange(24, dtype=np.int16).reshape(2, 3, 4), "labels": np.array(["a", "b"], object)}
    np.savez(tmp_path / "a.npz", allow_pickle=True, **arrays)
    np.savez_compressed(tmp_path / "b.npz", allow_pickle=True, **arrays)
    for name in ("a.npz", "b.npz"):
        again = torch_files.load(tmp_path / name)
        assert all(np.array_equal(again[key].numpy(), arrays[key]) for key in arrays)
    for array in (arrays["ids"], np.asfortranarray(arrays["ids"]), arrays["labels"]):
        np.save(tmp_path / "c.npy", array, allow_pickle=True)
        assert np.array_equal(torch_files.load(tmp_path / "c.npy").numpy(), array)


def test_data_classes_are_read_as_opaque_objects() -> None:
    path, when, name = Path("a/b"), datetime.datetime(2026, 1, 2), uuid.uuid4()
    again = load(pickle.dumps([path, when, name]))
    assert all(isinstance(each, OpaqueObject) for each in again)
    assert again[0].args == ("a", "b")


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    refused = {b"": "empty", b"PAR1....": "not a file of", b"{}": "not a file of", b"\x80": "pickle"}
    for content, message in refused.items():
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputError, match=message):
            torch_files.load(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(InputError, match="neither"):
        torch_files.load(tmp_path / "x")
    assert torch_files.mentions(tmp_path / "x", "hello") == set()
    for path in (tmp_path / "missing", tmp_path):
        assert not torch_files.looks_loadable(path)
        with pytest.raises(InputError, match="can't be read"):
            torch_files.load(path)


def test_torch_is_not_needed() -> None:
    names = ["slime", "verl", "nemo_rl", "sglang_recorder"]
    program = f"import sys\nfrom trimtab.trace.formats import {', '.join(names)}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_mentions_finds_keys_not_parts_of_them(tmp_path: Path) -> None:
    value = {"rollout_routed_experts": torch.arange(3), "a": 1}
    for content in (saved(value), pickle.dumps(value)):
        (tmp_path / "x").write_bytes(content)
        found = torch_files.mentions(tmp_path / "x", "routed_experts", "rollout_routed_experts", "a")
        assert found == {"rollout_routed_experts", "a"}


def entries(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


class WithStorages(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj if isinstance(obj, tuple) else None


def referring_to(*described: Any) -> bytes:
    """A pickle with a storage of this description."""
    content = io.BytesIO()
    WithStorages(content, 2).dump([described])
    return content.getvalue()


def of_objects(value: Any) -> bytes:
    """A .npy file of objects whose pickle has another value."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return content.getvalue() + pickle.dumps(value)


def test_damaged_files_are_refused_with_what_is_wrong() -> None:
    files = entries(saved({"a": torch.arange(3)}))
    (main,) = (name for name in files if name.endswith("data.pkl"))
    storage = "storage", "FloatStorage", "0", "cpu"
    cases = {
        "several data.pkl": zipped(files | {"data.pkl": files[main]}),
        "neither of torch.save nor": zipped({"a.npy": b"", "b.txt": b""}),
        "entry|storage|has no": zipped({name: data for name, data in files.items() if "data/" not in name}),
        "refers to a storage, but is no torch file": files[main],
        "without description": zipped({"data.pkl": referring_to("storage", 5)}),
        "a storage without": zipped({"data.pkl": referring_to(*storage, -1)}),
        "array of objects": of_objects([1]),
    }

    def arrays(content: bytes) -> Any:
        return [tensor.numpy() for tensor in load(content).values()]

    for message, content in cases.items():
        with pytest.raises(InputError, match=message):
            arrays(content)
