"""vLLM's server responses, outputs in memory, saved arrays, and the layout of 0.21."""

from __future__ import annotations

import base64
import gzip
import json
import re
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.import_items import dropped, kept, survives, tokens_of
from helpers.response_dumps import json_lines, npy_bytes, npy_text, routes
from trimtab import InputError
from trimtab.trace.formats import sglang, vllm
from trimtab.trace.formats.records import ImportOptions, Record

NOTHING = ImportOptions()


def completion(*choices: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": list(choices), **beside}


def choice(ids: Any, prompt: int, output: int, index: int = 0) -> dict[str, Any]:
    return {
        "index": index, "text": 'says "meta_info"', "token_ids": list(range(100, 100 + output)),
        "prompt_token_ids": list(range(prompt)), "routed_experts": ids,
    }  # fmt: skip


def record_of(routed: Any, **request: Any) -> Record:
    (record,) = kept(vllm.records_of_outputs([{"outputs": [{"token_ids": [5], "routed_experts": routed}], **request}]))
    return record


def read(path: Path) -> list[Record]:
    assert vllm.recognise(path)
    assert not sglang.recognise(path)
    return kept(vllm.read(path, NOTHING))


@pytest.mark.parametrize(
    ("experts", "dtype", "top_k"),
    [(255, "uint8", 8), (256, "uint8", 8), (257, "uint16", 8), (384, "uint16", 6), (16, "uint8", 1)],
)
def test_completion_response(tmp_path: Path, experts: int, dtype: str, top_k: int) -> None:
    ids = routes(7, 3, top_k, experts, dtype)
    ids[:, 0] = 0  # a dense layer
    (record,) = read(json_lines(tmp_path / "a.jsonl", [completion(choice(npy_text(ids), 5, 3))]))
    np.testing.assert_array_equal(record.ids, ids)
    assert record.ids.dtype == dtype
    assert (record.where, record.num_tokens, record.prompt_length, record.first) == ("line 1, choice 0", 8, 5, 0)
    assert tokens_of(record) == [0, 1, 2, 3, 4, 100, 101, 102]
    assert record.layers is None


def test_chat_response_with_several_choices(tmp_path: Path) -> None:
    first, second = routes(5, 2, 2, 8, "uint8"), routes(8, 2, 2, 8, "uint8", seed=1)
    response = {
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"content": "é\n中"}, "token_ids": [7, 8], "routed_experts": npy_text(first)},
            {"index": 1, "message": {"content": ""}, "token_ids": None, "routed_experts": npy_text(second)},
            {"index": 2, "message": {"content": ""}, "token_ids": [], "routed_experts": None},
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 7},
        "prompt_token_ids": [1, 2, 3, 4],
        "prompt_routed_experts": None,
    }
    records = read(json_lines(tmp_path / "a.jsonl", [response]))
    assert [record.where for record in records] == ["line 1, choice 0", "line 1, choice 1"]
    assert [record.num_tokens for record in records] == [6, None]  # usage is of all choices together
    assert [record.prompt_length for record in records] == [4, 4]
    assert dropped(vllm.read(tmp_path / "a.jsonl", NOTHING)) == {"responses without routed_experts": 1}
    np.testing.assert_array_equal(records[1].ids, second)


def test_wrappers_labels_and_layouts(tmp_path: Path) -> None:
    """The same two responses as JSON lines, an array, gzip, and a batch output."""
    responses = [
        completion(choice(npy_text(routes(4, 2, 2, 8, "uint8", seed=seed)), 3, 2), domain=f"d{seed}", step=seed)
        for seed in (1, 2)
    ]
    lines = json_lines(tmp_path / "lines.jsonl", responses)
    array = tmp_path / "array.json"
    array.write_text(json.dumps(responses, indent=1))
    one_line = tmp_path / "one-line.json"
    one_line.write_text(json.dumps(responses))
    zipped = tmp_path / "lines.jsonl.gz"
    zipped.write_bytes(gzip.compress(lines.read_bytes()))
    wrapped = [
        {"custom_id": "a", "domain": body.pop("domain"), "step": body.pop("step"), "response": {"body": body}}
        for body in map(dict, responses)
    ]
    batch = json_lines(tmp_path / "batch.jsonl", wrapped)
    expected = read(lines)
    assert [record.where for record in expected] == ["line 1, choice 0", "line 2, choice 0"]
    assert [(record.domain, record.step) for record in expected] == [("d1", 1), ("d2", 2)]
    for path in (array, one_line, zipped, batch):
        records = read(path)
        for record, other in zip(records, expected, strict=True):
            assert (record.domain, record.step, record.num_tokens) == (other.domain, other.step, other.num_tokens)
            np.testing.assert_array_equal(record.ids, other.ids)
    assert [record.where for record in read(array)] == ["item 1, choice 0", "item 2, choice 0"]


@pytest.mark.parametrize("form", ["lists", "npy", "mapping"])
def test_layout_of_0_21(tmp_path: Path, form: str) -> None:
    """The prompt apart, int16, MoE layers only; the prompt is shared by all choices."""
    prompt, outputs = routes(4, 2, 2, 300, "int16"), [routes(n, 2, 2, 300, "int16", seed=n) for n in (3, 1)]

    def encoded(ids: Any) -> Any:
        if form == "lists":
            return ids.tolist()
        if form == "npy":
            return npy_text(ids)
        data = base64.b64encode(ids.tobytes()).decode()
        return {"encoding": "base64", "dtype": "int16", "shape": list(ids.shape), "data": data}

    response = {
        "choices": [{"token_ids": [9] * (len(ids) + 1), "routed_experts": encoded(ids)} for ids in outputs],
        "prompt_token_ids": [1, 2, 3, 4],
        "prompt_routed_experts": encoded(prompt),
    }
    response["choices"].append({"token_ids": [5], "routed_experts": [] if form == "lists" else None})
    records = read(json_lines(tmp_path / "a.jsonl", [response]))
    for record, ids in zip(records, [*outputs, prompt[:0]], strict=True):
        np.testing.assert_array_equal(record.ids, np.concatenate([prompt, ids]))
        assert record.ids.dtype == np.int16
        assert (record.num_tokens, record.prompt_length) == (5 + len(ids), 4)


@pytest.mark.parametrize(
    ("prompt_routes", "rows", "first"),
    [
        pytest.param({"prompt_routed_experts": None}, 2, 3, id="of the completion alone"),
        pytest.param({"prompt_routed_experts": None}, 5, 0, id="of both"),
        pytest.param({"prompt_routed_experts": None}, 3, 0, id="of a part"),
        pytest.param({}, 2, 0, id="of a part, not 0.21"),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_only_the_completion_in_0_21(prompt_routes: dict[str, None], rows: int, first: int, counted: bool) -> None:
    """The prompt's routes were not requested: they are null, and rows are those of the completion."""
    ids = routes(rows, 2, 2, 8, "int16")
    response: dict[str, Any] = {"choices": [{"routed_experts": ids.tolist()}], **prompt_routes}
    if counted:
        response["usage"] = {"prompt_tokens": 3, "completion_tokens": 3}
    else:
        response["choices"][0]["token_ids"] = [4, 5, 6]
        response["prompt_token_ids"] = [1, 2, 3]
    (record,) = kept(vllm.records_of_outputs([response]))
    assert (record.first, record.num_tokens, record.prompt_length) == (first, 6, 3)
    assert record.placed == (first > 0)
    np.testing.assert_array_equal(record.ids, ids)


def test_rows_from_a_later_token_on() -> None:
    """As requested (`/v1/completions`, `/inference/v1/generate`) or as prime-rl's server states it beside the ids."""
    ids = routes(7, 2, 2, 8, "uint8")
    data = {"data": base64.b64encode(ids[4:].tobytes()).decode(), "shape": [3, 2, 2], "dtype": "uint8"}
    start = {"routed_experts_prompt_start": 4}
    for value in (
        completion(choice(data | {"start": 4}, 5, 3)),
        {"request": start, "response": completion(choice(npy_text(ids[4:]), 5, 3))},
        {"request": {"sampling_params": start}, "response": completion(choice(data, 5, 3))},
    ):
        (record,) = kept(vllm.records_of_outputs([value]))
        assert (record.first, record.placed) == (4, True)
        np.testing.assert_array_equal(record.ids, ids[4:])
    with pytest.raises(InputError, match="choice 0: its rows begin at token 3 of 8, so there should be 4; there are 3"):
        kept(vllm.records_of_outputs([completion(choice(data | {"start": 3}, 5, 3))]))
    with pytest.raises(InputError, match="choice 0: start is a text"):
        kept(vllm.records_of_outputs([completion(choice(data | {"start": "4"}, 5, 3))]))


@pytest.mark.parametrize(
    ("prompt", "rows", "length"),
    [
        ({"prompt_routed_experts": []}, 2, 0),
        ({"prompt_routed_experts": [[[5, 6]]]}, 3, 1),
        ({"prompt_routed_experts": [[[5, 6]]], "usage": {"prompt_tokens": 3}}, 3, 3),
        ({}, 2, 0),
    ],
)
def test_rows_for_a_part_of_the_prompt(prompt: dict[str, Any], rows: int, length: int) -> None:
    """The prompt was cached, wholly or in part; its length may be unknown."""
    response = {"choices": [{"routed_experts": [[[1, 2]], [[3, 4]]]}], **prompt}
    (record,) = kept(vllm.records_of_outputs([response]))
    assert (len(record.ids), record.prompt_length, record.num_tokens) == (rows, length, None)


def test_labels_of_a_response_override_those_of_its_wrapper() -> None:
    own = completion(choice(npy_text(routes(4, 2, 2, 8, "uint8")), 3, 2), domain="own", step=3)
    around = {"custom_id": "a", "domain": "around", "step": 1}
    for value in ({**around, "response": {"body": own}}, {**around, "response": own}):
        (record,) = kept(vllm.records_of_outputs([value]))
        assert (record.domain, record.step) == ("own", 3)
    del own["domain"], own["step"]
    (record,) = kept(vllm.records_of_outputs([{**around, "response": {"body": own}}]))
    assert (record.domain, record.step) == ("around", 1)
    # A response's own text may be called anything; it is no wrapper.
    (record,) = kept(vllm.records_of_outputs([own | {"result": {"routed_experts": None}}]))
    assert record.domain == ""


def test_large_token_ids_are_kept() -> None:
    assert tokens_of(record_of([[[1, 2]]], prompt_token_ids=[1 << 40])) == [1 << 40, 5]


def test_outputs_in_memory() -> None:
    ids = routes(6, 2, 2, 8, "uint8")
    whole = SimpleNamespace(token_ids=(4, 5, 6, 7), routed_experts=ids)
    empty = SimpleNamespace(token_ids=[], routed_experts=None)
    new = SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[whole, empty])
    rest = SimpleNamespace(token_ids=[4, 5], routed_experts=ids[3:4].astype(np.int16))
    prompt = ids[:3].astype(np.int16)
    old = SimpleNamespace(prompt_token_ids=[1, 2, 3], prompt_routed_experts=prompt, outputs=[rest])
    none = {"outputs": [{"routed_experts": None}, {"routed_experts": None}]}
    items = list(vllm.records_of_outputs([none, new, old, none]))
    records = kept(items)
    assert [record.where for record in records] == ["output 1, choice 0", "output 2, choice 0"]
    assert [record.num_tokens for record in records] == [7, 5]
    np.testing.assert_array_equal(records[0].ids, ids)
    np.testing.assert_array_equal(records[1].ids, ids[:4])
    assert dropped(items) == {"responses without routed_experts": 5}


@pytest.mark.parametrize("top_k", [1, 2])
def test_one_array(tmp_path: Path, top_k: int) -> None:
    ids = routes(6, 2, top_k, 300, "uint16")
    for content in (npy_bytes(ids), npy_bytes(ids.byteswap(), descr=">u2")):
        (tmp_path / "a.npy").write_bytes(content)
        (record,) = read(tmp_path / "a.npy")
        np.testing.assert_array_equal(record.ids, ids)
        assert record.ids.dtype.isnative


def test_arrays_in_fortran_order() -> None:
    ids = routes(5, 2, 3, 300, "uint16")
    file = BytesIO()
    np.save(file, np.asfortranarray(ids))
    np.testing.assert_array_equal(record_of(base64.b64encode(file.getvalue()).decode()).ids, ids)


@pytest.mark.parametrize(("gap", "dtype"), [(0, "uint8"), (-1, "int16")])
def test_padded_batch(tmp_path: Path, gap: int, dtype: str) -> None:
    """Padding at both ends is dropped; rows without a route in between have the id of unknown routes."""
    batch = np.full((3, 8, 2, 2), gap, dtype)
    ids = routes(8, 2, 2, 8, dtype)
    batch[0, :5], batch[1, 2:8] = ids[:5], ids[:6]
    batch[1, 4] = gap
    path = tmp_path / "a.npy"
    path.write_bytes(npy_bytes(batch))
    first, second, third = read(path)
    np.testing.assert_array_equal(first.ids, ids[:5])
    np.testing.assert_array_equal(second.ids, batch[1, 2:])
    assert len(third.ids) == 0
    assert dropped(vllm.read(path, NOTHING)) == {"padding rows": 3 + 2 + 8}
    named = tmp_path / "b.npz"
    np.savez(named, routed_experts=batch, lengths=np.array([5, 8, 0]), prompt_lengths=[2, 3, 0], steps=[4, 4, 5])
    first, second, third = read(named)
    assert [len(record.ids) for record in (first, second, third)] == [5, 8, 0]
    assert [record.prompt_length for record in (first, second, third)] == [2, 3, 0]
    assert third.step == 5
    assert dropped(vllm.read(named, NOTHING)) == {"padding rows": 3 + 8}


@pytest.mark.parametrize(
    ("rows", "kept_rows"),
    [([[0], [3], [0]], slice(0, 3)), ([[-1], [3], [-1]], slice(1, 2)), ([[-1, 2], [0, 3], [-1, -1]], slice(0, 2))],
)
def test_rows_that_may_be_routes_are_not_padding(rows: list[list[int]], kept_rows: slice, tmp_path: Path) -> None:
    """Of one layer and top-1, 0 is an expert; and a row that is -1 in part is no padding."""
    np.save(tmp_path / "a.npy", np.array(rows)[None, :, None])
    (record,) = kept(vllm.read(tmp_path / "a.npy", ImportOptions()))
    assert record.ids[:, 0].tolist() == rows[kept_rows]


def test_envelopes_of_nemo_rl() -> None:
    for dtype in ("int8", "int16", "int32"):
        ids = routes(4, 2, 2, 100, dtype)
        data = base64.b64encode(ids.tobytes()).decode()
        np.testing.assert_array_equal(record_of(f"nrlre1:{dtype}:4x2x2:{data}").ids, ids)
        assert record_of(f"nrlre1:{dtype}:4x2x2:{data}").ids.dtype == dtype
        for text, error in (
            (f"nrlre1:{dtype}:4x2x3:{data}", "claims shape [4, 2, 3]"),
            (f"nrlre1:float16:4x2x2:{data}", "should be one of"),
            (f"nrlre1:{dtype}:4x2:{data}", "not valid base64"),
        ):
            with pytest.raises(InputError, match=re.escape(error)):
                record_of(text)


def test_the_size_of_raw_numbers_decides_their_dtype() -> None:
    for dtype in ("uint8", "int16", "int32", "int64"):
        ids = routes(4, 2, 2, 200, dtype)
        value = {"data": base64.b64encode(ids.tobytes()).decode(), "shape": [4, 2, 2]}
        for routed in (value, value | {"dtype": f" {dtype.upper()}"}):
            np.testing.assert_array_equal(record_of(routed).ids, ids)
            assert record_of(routed).ids.dtype == dtype


@pytest.mark.parametrize("compressed", [False, True])
def test_sequences_in_one_array(tmp_path: Path, compressed: bool) -> None:
    ids = routes(9, 2, 2, 8, "uint8")
    save: Any = np.savez_compressed if compressed else np.savez
    for facts in ({"sequence_starts": [0, 4, 4, 9]}, {"sequence_starts": [0, 4, 4]}, {"lengths": [4, 0, 5]}):
        save(tmp_path / "a.npz", routed_experts=ids, **facts)
        records = read(tmp_path / "a.npz")
        assert [len(record.ids) for record in records] == [4, 0, 5]
        np.testing.assert_array_equal(np.concatenate([record.ids for record in records]), ids)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"sequence_starts": [0, 6, 4, 9]}, "sequence_starts should be ascending from 0 to the number of tokens, 9"),
        ({"sequence_starts": [1, 4, 9]}, "sequence_starts should be ascending"),
        ({"lengths": [4, -1, 6]}, "lengths should add up to the number of tokens, 9"),
        ({"lengths": [4, 6]}, "lengths should add up"),
        ({"lengths": [4, 5], "steps": [1, 2, 3]}, "steps should be 2 whole numbers of 0 to 2147483647, one a sequence"),
        ({"lengths": [4, 5], "prompt_lengths": [1, 1 << 31]}, "prompt_lengths should be 2 whole numbers"),
    ],
)
def test_invalid_sequence_facts_are_refused(tmp_path: Path, facts: dict[str, Any], expected: str) -> None:
    np.savez(tmp_path / "a.npz", routed_experts=routes(9, 2, 2, 8, "uint8"), **facts)
    assert expected in refused(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(2, 2), (4, 2, 0), (4, 0, 2), (2, 0, 2, 2)])
def test_arrays_of_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "a.npz", routed_experts=np.zeros(shape, np.uint8))
    assert f"routed_experts has shape {list(shape)}" in refused(tmp_path / "a.npz")


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        kept(vllm.read(path, NOTHING))
    assert str(path) not in str(caught.value)
    return str(caught.value)


def test_invalid_responses_are_refused(tmp_path: Path) -> None:
    good = npy_text(routes(4, 2, 2, 8, "uint8"))

    def message(routed: Any, **beside: Any) -> str:
        fine = completion(choice(good, 3, 2))
        return refused(json_lines(tmp_path / "a.jsonl", [fine, completion(choice(routed, 3, 2), **beside)]))

    assert message("%%%").startswith("line 2, choice 0: routed_experts is not valid base64")
    assert "--num-layers" in message(good[200:])
    ids = routes(4, 2, 2, 8, "uint8")
    assert message(npy_text(ids.astype("f4"))) == "line 2, choice 0: ids are float32; they should be integers"
    assert "claims shape [4, 2, 3] of uint8; there are 16 bytes" in message(npy_text(ids, shape="(4, 2, 3)"))
    assert "claims shape [1000000000000, 48, 8]" in message(npy_text(ids, shape="(1000000000000, 48, 8)"))
    assert "it holds objects; only plain numbers are read" in message(npy_text(ids, descr="|O"))
    assert "shape [4, 2]" in message(npy_text(ids[:, :, 0]))
    assert "there is true or false" in message([[[1, True]]])
    assert "there is a number" in message([[[1, 2.0]]])
    assert "different lengths, 1 and 2" in message([[[1, 2]], [[1]]])
    assert "that is no expert" in message([[[1, 10**30]]])
    assert "no 'shape'" in message({"data": "AAAA"})
    assert message(None, choices=7) == "line 2: choices are a whole number; expected a list"


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps(completion(choice(npy_text(routes(4, 2, 2, 8, "uint8")), 3, 2)))
    for text, expected in (
        ("", "no response holds"),
        (line + "\n" + line[:-40], "line 2: not valid JSON (cut off)"),
        (line + "\n{]", "line 2: not valid JSON"),
        ("[" + line + " " + line, "item 1: no comma after it"),
        ("[" + line, "item 1: the array is cut off"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "line 1: a number of thousands of digits"),
        ("7", "line 1: a whole number; expected a response"),
        (json.dumps(completion({"routed_experts": None})), "no response holds routed_experts"),
    ):
        path.write_text(text)
        assert expected in refused(path), text[:50]
    path.write_bytes(line.encode() + b"\n\xff\xfe")
    assert "not UTF-8" in refused(path)
    path.write_bytes(gzip.compress(line.encode() * 50)[:-30])
    assert "can't be read" in refused(path)


def test_values_longer_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and line numbers do not depend on the size of reads."""
    responses = [completion(choice(npy_text(routes(4, 2, 2, 8, "uint8", seed=s)), 3, 2), n=12.5) for s in range(3)]
    lines = json_lines(tmp_path / "a.jsonl", [*responses, [], *responses])
    with lines.open("a") as file:
        file.write("\n\n  " + json.dumps(responses[0], indent=2))
    whole = [(record.where, record.ids.tolist()) for record in read(lines)]
    assert [where for where, _ in whole[-2:]] == ["line 7, choice 0", "line 10, choice 0"]
    for size in (1, 7, 100):
        monkeypatch.setattr("trimtab.trace.containers.json_values._READ_AT_ONCE", size)
        assert [(record.where, record.ids.tolist()) for record in read(lines)] == whole


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    ids = routes(5, 2, 2, 8, "uint8")
    old = {"choices": [{"routed_experts": ids[3:].tolist()}], "prompt_routed_experts": ids[:3].tolist(), "usage": {}}
    lines = json_lines(tmp_path / "a.jsonl", [completion(choice(npy_text(ids), 4, 2)), old])
    np.savez(tmp_path / "a.npz", routed_experts=ids, sequence_starts=[0, 2, 5], prompt_lengths=[1, 1])
    for content in (lines.read_bytes(), (tmp_path / "a.npz").read_bytes(), npy_bytes(ids[None])):
        assert survives(content, tmp_path / "damaged", lambda path: vllm.read(path, NOTHING), 300) > 100
