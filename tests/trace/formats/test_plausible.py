"""Well-formed and odd: repeated rows, tokens that count twice, prompts that disagree."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab import InputError, read_trace
from trimtab.array_type import Array
from trimtab.cli.main import main
from trimtab.trace import synthesize
from trimtab.trace.formats import plausible, turns
from trimtab.trace.formats.plausible import Plausibility
from trimtab.trace.formats.records import ImportOptions, Record
from trimtab.trace.store import TraceReader, write_trace

EXPERTS, TOP_K, LAYERS = 128, 8, 3


def routes(tokens: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)


def response(prompt: Sequence[int], answer: Sequence[int], ids: Array) -> str:
    """A line of a server's log; the last token is never fed."""
    file = io.BytesIO()
    np.save(file, ids)
    choice = {"token_ids": list(answer), "routed_experts": base64.b64encode(file.getvalue()).decode()}
    return json.dumps({"prompt_token_ids": list(prompt), "choices": [choice]})


def imported(path: Path, lines: Sequence[str], **options: Any) -> trimtab.RoutingTrace:
    path.write_text("\n".join(lines))
    return trimtab.import_dump(path, num_experts=EXPERTS, **options)


def conversation() -> list[str]:
    """Two turns, and 30 other sequences."""
    ids, tokens = routes(89, 0), list(range(1000, 1090))
    others = [response([seed] * 9, [seed] * 40, routes(48, seed)) for seed in range(2, 32)]
    return [response(tokens[:20], tokens[20:50], ids[:49]), response(tokens[:60], tokens[60:90], ids), *others]


def test_turns_of_a_conversation_are_noted(tmp_path: Path) -> None:
    (note,) = imported(tmp_path / "a.jsonl", conversation()).notes
    assert note.startswith("1 of 32 sequences are the beginning of another")
    assert imported(tmp_path / "b.jsonl", conversation()[1:]).notes == ()


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
@pytest.mark.parametrize("start", [0, 49])
def test_turns_are_merged(order: slice, start: int, tmp_path: Path) -> None:
    """The second turn's rows may begin where those of the first end (`routed_experts_prompt_start`)."""
    lines, ids = conversation(), routes(89, 0)
    tokens = list(range(1000, 1090))
    second = json.loads(response(tokens[:60], tokens[60:], ids[start:]))
    lines[1] = json.dumps({"request": {"routed_experts_prompt_start": start}, "response": second})
    trace = imported(tmp_path / "a.jsonl", lines[order], merge_turns=True)
    alone = imported(tmp_path / "b.jsonl", conversation()[1:])
    assert (trace.notes, trace.num_sequences) == ((), 31)
    assert sorted(trace.sequence_hashes.tolist()) == sorted(alone.sequence_hashes.tolist())
    merged = trace.sequence_hashes.tolist().index(int(alone.sequence_hashes[0]))
    assert np.array_equal(trace.sequence(merged), ids)
    assert trace.prompt_lengths[merged] == 20


def test_rows_that_a_later_turn_lost_are_those_of_the_turns_before(tmp_path: Path) -> None:
    """Engines fill rows of a cached prefix with zeros; a turn of another step is of other weights."""
    tokens, ids = list(range(1000, 1090)), routes(89, 0)
    lost = ids.copy()
    lost[:40] = 0
    lines = [response(tokens[:20], tokens[20:50], ids[:49]), response(tokens[:60], tokens[60:], lost)]
    trace = imported(tmp_path / "a.jsonl", lines, merge_turns=True)
    assert np.array_equal(trace.sequence(0), ids)
    for step, line in enumerate(lines):
        (tmp_path / f"step{step}.jsonl").write_text(line)
    files = [tmp_path / "step0.jsonl", tmp_path / "step1.jsonl"]
    options: dict[str, Any] = {"num_experts": EXPERTS, "step_from": r"step(\d)", "merge_turns": True}
    assert trimtab.import_dump(files, **options).num_sequences == 2


def test_turns_without_token_ids_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", routes(9, 0))
    with pytest.raises(InputError, match="no token ids"):
        trimtab.import_dump(tmp_path / "a.npy", num_experts=EXPERTS, merge_turns=True)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8), st.data())
def test_merged_turns_are_those_of_a_plain_search(sequences: list[list[int]], data: st.DataObject) -> None:
    """Every row that any turn has is there, at its token."""
    firsts = [data.draw(st.integers(0, len(tokens) - 1)) for tokens in sequences]
    row = {tuple(tokens[: end + 1]): number for number, (tokens, end) in enumerate(
        (tokens, end) for tokens in sequences for end in range(len(tokens))
    )}  # fmt: skip
    records = []
    for index, (tokens, first) in enumerate(zip(sequences, firsts, strict=True)):
        numbers = [row[tuple(tokens[: end + 1])] % 100 for end in range(first, len(tokens) - 1)]
        ids = np.array([[[number, number + 1]] for number in numbers], np.int16).reshape(-1, 1, 2)
        records.append(Record(ids, str(index), first=first, num_tokens=len(tokens), tokens=(tokens,)))
    found = [item for item in turns.merged(lambda: records, ImportOptions()) if isinstance(item, Record)]
    turns_of: dict[int, list[int]] = {index: [index] for index in range(len(sequences))}
    for index, one in enumerate(sequences):
        longer = [at for at, each in enumerate(sequences) if len(each) > len(one) and each[: len(one)] == one]
        if longer:
            turns_of[max(longer, key=lambda at: (len(sequences[at]), -at))].append(index)
            del turns_of[index]
    assert sorted(int(record.where) for record in found) == sorted(turns_of)
    for record in found:
        tokens, members = sequences[int(record.where)], turns_of[int(record.where)]
        assert record.token_ids is not None
        assert record.token_ids.tolist() == tokens
        rows = {record.first + place: ids[0].tolist() for place, ids in enumerate(record.ids)}
        for place in range(len(tokens) - 1):
            number = row[tuple(tokens[: place + 1])] % 100
            is_known = any(firsts[turn] <= place < len(sequences[turn]) - 1 for turn in members)
            assert rows.get(place, [0, 0]) == ([number, number + 1] if is_known else [0, 0])


def test_answers_that_begin_alike_are_no_beginnings(tmp_path: Path) -> None:
    """Up to their last token."""
    tokens = list(range(40))
    lines = [response(tokens, [1, 2, last], routes(42, 0)) for last in range(4)]
    assert imported(tmp_path / "a.jsonl", lines).notes == ()


def test_equal_sequences_are_noted(tmp_path: Path) -> None:
    lines = conversation()[2:]
    (note,) = imported(tmp_path / "a.jsonl", [*lines, lines[4], lines[9]]).notes
    assert note.startswith("2 of 32 sequences have the same tokens as another")


def test_short_answers_may_be_equal(tmp_path: Path) -> None:
    lines = [response([9] * 30, [seed % 3, 7], routes(31, 0)) for seed in range(12)]
    assert imported(tmp_path / "a.jsonl", lines).notes == ()


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(1, 8, 1), (1, 8, 2), (2, 8, 1), (2, 2, 2), (2, 4, 4)])
def test_rows_that_are_equal_by_chance_are_fine(layers: int, experts: int, top_k: int) -> None:
    odd = Plausibility()
    rows = np.argsort(np.random.default_rng(0).random((500, layers, experts)), axis=2)[..., :top_k].astype(np.uint8)
    assert not odd.add(rows, experts, None, (0, 0), 0).any()
    assert list(odd.notes()) == []


def test_rows_may_lack_a_layer() -> None:
    odd, ids = Plausibility(), routes(50, 0)
    ids[:, 1] = 255
    ids[20:40] = ids[19]
    assert odd.add(ids, EXPERTS, None, (0, 0), 0).sum() == odd.repeated == 20


def test_prompts_are_compared_with_one_that_is_known() -> None:
    """The first answer's prompt was in a prefix cache."""
    odd = Plausibility()
    for seed in range(4):
        ids = routes(30, seed)
        ids[: 20 if seed == 0 else 0] = 255
        odd.add(ids, EXPERTS, None, (0, 1), 20)
    assert (odd.prompt_routes, odd.agreeing) == (2 * 20 * LAYERS, 0)


def test_prompts_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones, whatever went before."""
    ids = routes(40, 0)
    monkeypatch.setattr(plausible, "PROMPT_BYTES", 2 * plausible.PROMPT_ROWS * LAYERS * TOP_K)
    odd = Plausibility()
    for prompt in (1, 2, 3, 4, 4, 3, 1):
        odd.add(ids, EXPERTS, None, (0, prompt), 40)
    assert odd.agreeing == odd.prompt_routes == 2 * plausible.PROMPT_ROWS * LAYERS


@pytest.mark.parametrize("kind", ["stale", "ascending"])
def test_rows_that_no_router_chose_are_noted_and_dropped(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = routes(100, 0)
    ids[60:63] = ids[59] if kind == "stale" else np.arange(TOP_K)
    # One layer that is the same is by chance.
    ids[20, 1], ids[31, 0] = ids[19, 1], ids[30, 0]
    lines = [response([5] * 20, list(range(81)), ids)]
    trace = imported(tmp_path / "a.jsonl", lines)
    (note,) = trace.notes
    assert note.startswith("3% of the rows repeat the row before in all layers, or are 0 to K-1")
    assert (trace.expert_ids != trace.no_route).all()
    dropped = imported(tmp_path / "a.jsonl", lines, drop_repeats=True)
    assert dropped.notes == ()
    is_unknown_T = (dropped.expert_ids == dropped.no_route).all(axis=(1, 2))
    assert np.flatnonzero(is_unknown_T).tolist() == [60, 61, 62]
    assert np.array_equal(dropped.expert_ids[~is_unknown_T], trace.expert_ids[~is_unknown_T])
    options = ["-o", str(tmp_path / "a.parquet"), "--num-experts", str(EXPERTS), "--drop-repeats"]
    assert main(["trace", "import", str(tmp_path / "a.jsonl"), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without any route 3 tokens" in said
    assert "left out 3 repeated rows, now without route" in said


def test_prompts_of_equal_answers_should_agree(tmp_path: Path) -> None:
    prompt, base = [9] * 30, routes(30, 0)
    answers = [routes(9, seed) for seed in range(1, 9)]
    alike = [np.concatenate([base, answer]) for answer in answers]
    lines = [response(prompt, range(seed, seed + 10), ids) for seed, ids in enumerate(alike)]
    assert imported(tmp_path / "a.jsonl", lines).notes == ()
    alike[3][:30] = routes(30, 99)
    lines[3] = response(prompt, range(3, 13), alike[3])
    (note,) = imported(tmp_path / "a.jsonl", lines).notes
    assert note.startswith("Prompts' routes agree in 85.7%")


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_beginnings_are_those_of_a_plain_search(sequences: list[list[int]]) -> None:
    odd = Plausibility(least_answer=0)
    for tokens in sequences:
        odd.add(routes(len(tokens), 0), EXPERTS, np.array(tokens, np.int64), (0, 0), 0)
    known = [tokens for tokens in sequences if tokens]
    within = sum(any(len(other) > len(one) and other[: len(one)] == one for other in known) for one in known)
    again = len(known) - len({tuple(tokens) for tokens in known})
    notes = " ".join(odd.notes())
    for count, text in ((within, "are the beginning of another"), (again, "have the same tokens as another")):
        assert (f"{count} of {len(known)} sequences {text}" in notes) == (count > 0)
        assert (text in notes) == (count > 0)


def test_notes_are_in_the_file_and_above_every_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(conversation()))
    file = str(tmp_path / "a.parquet")
    assert main(["trace", "import", str(tmp_path / "a.jsonl"), "-o", file, "--num-experts", str(EXPERTS)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    begins = "1 of 32 sequences are the beginning of another"
    assert begins in said
    assert read_trace(file).notes[0].startswith(begins)
    write_trace(read_trace(file), tmp_path / "again.parquet")
    assert TraceReader([file, tmp_path / "again.parquet"]).empty.notes == read_trace(file).notes
    for command in ("analyze", "plan", "simulate", "advise"):
        assert main([command, file, "--ranks", "4"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count(begins) == 1, command
        assert printed.index(begins) < 400, command


def test_notes_of_a_file_are_checked(tmp_path: Path) -> None:
    trace = synthesize(num_sequences=4, sequence_length=8, num_layers=2, num_experts=8, top_k=2, zipf=1.0)
    for content in (b"{", b"[1]", b"{}", json.dumps(["x"] * 17).encode()):
        write_trace(trace, tmp_path / "a.parquet")
        table = pq.read_table(tmp_path / "a.parquet")
        metadata = {**table.schema.metadata, b"trimtab-notes": content}
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
        with pytest.raises(InputError, match="trimtab-notes should be a list of at most 16 texts"):
            read_trace(tmp_path / "a.parquet")


def test_a_file_has_no_more_notes_than_one_may_have(tmp_path: Path) -> None:
    trace = synthesize(num_sequences=4, sequence_length=8, num_layers=2, num_experts=8, top_k=2, zipf=1.0)
    for number in range(17):
        write_trace(trace, tmp_path / f"{number:02}.parquet", notes=[f"note {number}"].copy)
    write_trace(read_trace(tmp_path), tmp_path / "all.parquet")
    assert len(read_trace(tmp_path / "all.parquet").notes) == 16
