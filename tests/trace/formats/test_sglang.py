"""SGLang's responses: `/generate`, its engine, and OpenAI-compatible ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.import_items import dropped, kept, tokens_of
from helpers.response_dumps import json_lines, raw_text, routes
from trimtab import InputError
from trimtab.array_type import Array
from trimtab.trace.formats import sglang
from trimtab.trace.formats.importing import format_of
from trimtab.trace.formats.records import ImportOptions, Record

MODEL = ImportOptions(num_layers=3, top_k=2)


def response(ids: Array, prompt: int, output: int, **meta: Any) -> dict[str, Any]:
    return {
        "text": "...",
        "output_ids": list(range(50, 50 + output)),
        "meta_info": {
            "id": "a1", "finish_reason": {"type": "stop", "matched": 1}, "prompt_tokens": prompt, "cached_tokens": 0,
            "completion_tokens": output, "routed_experts": raw_text(ids), **meta,
        },
    }  # fmt: skip


def read(path: Path, known: ImportOptions = MODEL) -> list[Record]:
    assert format_of(path) == "sglang"
    return kept(sglang.read(path, known))


@pytest.mark.parametrize(
    ("experts", "dtype", "top_k"),
    [(255, "int32", 2), (256, "uint8", 2), (257, "uint16", 2), (384, "int32", 8), (16, "int32", 1)],
)
def test_generate_response(tmp_path: Path, experts: int, dtype: str, top_k: int) -> None:
    ids = routes(7, 3, top_k, experts, dtype)
    ids[:, 0] = 0  # a dense layer
    meta = {} if dtype == "int32" else {"routed_experts_dtype": dtype}
    path = json_lines(tmp_path / "a.jsonl", [response(ids, 5, 3, **meta)])
    (record,) = read(path, ImportOptions(num_layers=3, top_k=top_k))
    np.testing.assert_array_equal(record.ids, ids)
    assert (record.where, record.num_tokens, record.prompt_length, record.first) == ("line 1", 8, 5, 0)
    assert record.token_ids is None  # the prompt's are not there


def test_shared_prompts_and_lists(tmp_path: Path) -> None:
    """A group shares its prompt: the routes of all but the first answer start after it."""
    ids = routes(9, 3, 2, 8, "int32")
    group = [response(ids, 6, 4, step=1)] + [response(ids[6:], 6, 4, routed_experts_start_len=6) for _ in range(2)]
    for each in group:
        each |= {"input_ids": list(range(6)), "data_source": "gsm8k", "step": 3}
    for path in (json_lines(tmp_path / "a.jsonl", [group]), json_lines(tmp_path / "b.json", group)):
        records = read(path)
        places = [(record.first, len(record.ids), record.num_tokens) for record in records]
        assert places == [(0, 9, 10), (6, 3, 10), (6, 3, 10)]
        for record in records:
            assert tokens_of(record) == [*range(6), 50, 51, 52, 53]
            assert (record.domain, record.step) == ("gsm8k", 3)
    assert [record.where for record in read(tmp_path / "a.jsonl")] == ["item 1", "item 2", "item 3"]
    memory = kept(sglang.records_of_responses([group[0], group[1:]], MODEL))
    assert [record.where for record in memory] == ["response 0", "response 1, response 0", "response 1, response 1"]
    assert [record.first for record in kept(sglang.records_of_responses(group[1], MODEL))] == [6]


def test_the_first_row_is_the_one_that_the_request_asks_for() -> None:
    """miles' `SessionRecord`s and clients of `/v1/chat/completions`; SGLang's answers do not repeat the field."""
    ids, prompt = routes(9, 3, 2, 8, "int32"), list(range(6))
    start = {"routed_experts_start_len": 4}
    for request in (start | {"input_ids": prompt}, {"extra_body": start, "input_ids": prompt}):
        answer = response(ids[4:], 6, 4)
        (record,) = kept(sglang.records_of_responses([{"request": request, "response": answer}], MODEL))
        assert (record.first, record.placed, tokens_of(record)) == (4, True, [*prompt, 50, 51, 52, 53])
        np.testing.assert_array_equal(record.ids, ids[4:])
        answer = response(ids[5:], 6, 4, routed_experts_start_len=5)
        (record,) = kept(sglang.records_of_responses([{"request": request, "response": answer}], MODEL))
        assert record.first == 5
        with pytest.raises(InputError, match="begin at token 4 of 10, so there should be 5; there are 4"):
            kept(sglang.records_of_responses([{"request": request, "response": response(ids[5:], 6, 4)}], MODEL))
    with pytest.raises(InputError, match=r"^response 0: routed_experts_start_len is a list"):
        kept(sglang.records_of_responses([{"request": {"routed_experts_start_len": [4]}, "response": {}}], MODEL))
    (record,) = kept(sglang.records_of_responses([response(ids[4:], 6, 4)], MODEL))
    assert (record.first, record.placed) == (0, False)


def test_ids_of_generated_tokens_from_logprobs() -> None:
    each = response(routes(4, 3, 2, 8, "int32"), 3, 2, output_token_logprobs=[[-0.1, 70, None], [-0.2, 71, None]])
    del each["output_ids"]
    (record,) = kept(sglang.records_of_responses([{"prompt_token_ids": [1, 2, 3], "response": each}], MODEL))
    assert tokens_of(record) == [1, 2, 3, 70, 71]
    # Not as many as are counted.
    (record,) = kept(sglang.records_of_responses([each | {"input_ids": [1, 2]}], MODEL))
    assert (record.num_tokens, record.token_ids) == (5, None)


def test_openai_compatible(tmp_path: Path) -> None:
    ids = routes(7, 3, 2, 8, "int32")
    chat = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"content": "hi"}}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
        "sglext": {"routed_experts": raw_text(ids)},
    }
    several = {
        "choices": [
            {"index": 0, "meta_info": response(ids, 5, 3)["meta_info"]},
            {"index": 1, "meta_info": {"routed_experts": None}},
            {"index": 2, "sglext": {"routed_experts": raw_text(ids[:6])}},
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5},
    }
    first, second, third = read(json_lines(tmp_path / "a.jsonl", [chat, several]))
    assert [record.num_tokens for record in (first, second, third)] == [8, 8, None]
    places = ["line 1, choice 0", "line 2, choice 0", "line 2, choice 2"]
    assert [record.where for record in (first, second, third)] == places
    assert dropped(sglang.read(tmp_path / "a.jsonl", MODEL)) == {"responses without routed_experts": 1}
    np.testing.assert_array_equal(first.ids, ids)
    np.testing.assert_array_equal(third.ids, ids[:6])


def test_routes_beside_several_choices_are_those_of_the_first() -> None:
    ids = routes(7, 3, 2, 8, "int32")
    beside = {"choices": [{"index": 0}, {"index": 1}], "sglext": {"routed_experts": raw_text(ids)}}
    (record,) = kept(sglang.records_of_responses([beside], MODEL))
    assert record.where == "response 0, choice 0"
    assert dropped(sglang.records_of_responses([beside], MODEL)) == {"responses without routed_experts": 1}
    # What a choice itself says comes first.
    beside["choices"][0]["sglext"] = {"routed_experts": raw_text(ids[:2])}  # type: ignore[index]
    (record,) = kept(sglang.records_of_responses([beside], MODEL))
    assert len(record.ids) == 2


def test_chunks_of_a_stream(tmp_path: Path) -> None:
    """Routes and token ids are in the last one, which has no choice."""
    ids = routes(7, 3, 2, 8, "int32")
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in "ab"]
    sglext = {"routed_experts": raw_text(ids), "input_ids": [1, 2, 3, 4, 5], "output_ids": [[70, 71, 72]]}
    lines = json_lines(tmp_path / "a.jsonl", [*chunks, {"choices": [], "sglext": sglext}])
    (record,) = read(lines)
    assert (record.num_tokens, record.prompt_length) == (8, 5)
    assert tokens_of(record) == [1, 2, 3, 4, 5, 70, 71, 72]
    np.testing.assert_array_equal(record.ids, ids)
    assert dropped(sglang.read(lines, MODEL)) == {"responses without routed_experts": 2}


def test_completions_without_tokens() -> None:
    """Aborted before any forward pass, or only a prompt."""
    none = response(routes(0, 3, 2, 8, "int32"), 4, 0, routed_experts=None)
    prompt_only = response(routes(3, 3, 2, 8, "int32"), 4, 0)
    nothing_new = response(routes(0, 3, 2, 8, "int32"), 4, 0, routed_experts_start_len=3)
    records = kept(sglang.records_of_responses([none, prompt_only, nothing_new], MODEL))
    assert [(len(record.ids), record.first, record.num_tokens) for record in records] == [(3, 0, 4), (0, 3, 4)]


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    ids = routes(7, 3, 2, 8, "int32")

    def message(known: ImportOptions = MODEL, **meta: Any) -> str:
        path = json_lines(tmp_path / "a.jsonl", [response(ids, 5, 3, **meta)])
        with pytest.raises(InputError) as caught:
            kept(sglang.read(path, known))
        return str(caught.value)

    or_model = "or --model with a config.json or a model's name"
    assert message(ImportOptions(top_k=2)) == f"line 1: routed_experts has no shape; give --num-layers, {or_model}"
    assert message(ImportOptions(num_layers=2)) == f"line 1: routed_experts has no shape; give --top-k, {or_model}"
    assert message(ImportOptions()) == f"line 1: routed_experts has no shape; give --num-layers and --top-k, {or_model}"
    wrong = "line 1: routed_experts holds 42 ids of int32, which 5 layers x top-2 don't divide"
    assert message(ImportOptions(num_layers=5, top_k=2)) == wrong
    assert "168 bytes" not in message(routed_experts_dtype="float16")
    assert message(routed_experts_dtype="float16").startswith("line 1: routed_experts_dtype is 'float16'; it should be")
    assert "no whole number of int32" in message(routed_experts="AAAAAAA=")
    assert "routed_experts_start_len is out of range" in message(routed_experts_start_len=-1)
    assert "prompt_tokens is a text" in message(prompt_tokens="many")
    assert "prompt_tokens is true or false" in message(prompt_tokens=True)
    assert "no response holds routed_experts" in message(routed_experts=None)
