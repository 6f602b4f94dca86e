"""Every format is imported as the same routing, and thousands of damaged files are refused or read whole."""

from __future__ import annotations

import json
import logging
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.every_dump import LAYERS, NUM_EXPERTS, TOP_K, Dump, all_dumps, parquet_dump, routes
from helpers.examples import examples
from helpers.import_items import damaged
from helpers.pickled_dumps import saved
from helpers.response_dumps import json_lines, npy_text
from helpers.response_dumps import routes as plain_routes
from trimtab import InputError, RoutingTrace, import_dump, read_trace, write_trace
from trimtab.api.import_dump import with_model
from trimtab.cli.main import main
from trimtab.cluster import load_model
from trimtab.trace import ImportOptions
from trimtab.trace.formats.from_memory import from_verl
from trimtab.trace.formats.importing import FORMATS, format_of, import_files, import_own_files, model_label
from trimtab.trace.formats.normalise import Summary

DUMPS = all_dumps()
KNOWN = ImportOptions(NUM_EXPERTS, LAYERS, TOP_K)
OPTIONS = ["--num-experts", str(NUM_EXPERTS), "--num-layers", str(LAYERS), "--top-k", str(TOP_K)]
DAMAGED = examples(short=50, long=1_500)


def as_sets(ids: Any) -> list[Any]:
    return np.sort(ids, axis=-1).tolist()


def test_every_format_has_a_dump_here() -> None:
    assert {dump.form for dump in DUMPS.values()} == set(FORMATS)


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_is_recognised_and_imported(name: str, tmp_path: Path) -> None:
    dump = DUMPS[name]
    file = tmp_path / f"dump{dump.suffix}"
    file.write_bytes(dump.content)
    assert format_of(file) == dump.form
    (tmp_path / "no suffix").write_bytes(dump.content)
    assert format_of(tmp_path / "no suffix") == dump.form
    trace = RoutingTrace.concatenate(list(import_files([file], dump.form, KNOWN, Summary())))
    assert (trace.num_experts, trace.layer_indices.tolist()) == (NUM_EXPERTS, list(range(LAYERS)))
    expected = [each[:, :LAYERS] for each in routes()[: 1 if name == "vllm:npy" else None]]
    if name in ("sglang-recorder:counts", "counts:csv"):
        for sequence, each in enumerate(expected):
            for layer in range(LAYERS):
                made = np.bincount(trace.sequence(sequence)[:, layer].ravel(), minlength=NUM_EXPERTS)
                assert made.tolist() == np.bincount(each[:, layer].ravel(), minlength=NUM_EXPERTS).tolist()
    elif name in ("megatron", "sglang-recorder:tokens"):
        # These know tokens, not sequences.
        assert as_sets(trace.expert_ids) == as_sets(np.concatenate(expected))
    else:
        assert [as_sets(trace.sequence(index)) for index in range(trace.num_sequences)] == list(map(as_sets, expected))


def test_several_files_of_several_steps_become_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        (tmp_path / f"rollout-{step}.jsonl").write_bytes(DUMPS["vllm:jsonl"].content)
    command = ["trace", "import", str(tmp_path / "rollout-*.jsonl"), "--domain", "maths", "--step", "4"]
    assert main([*command, "-o", str(tmp_path / "trace.parquet"), *OPTIONS]) == 0
    trace = read_trace(tmp_path / "trace.parquet")
    assert as_sets(trace.expert_ids) == as_sets(np.concatenate(routes() * 3))
    assert set(trace.domains) == {"maths"}
    assert set(trace.steps) == {4}
    assert "Imported" in capsys.readouterr().out


def test_rows_for_a_part_of_a_sequence_need_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = plain_routes(4, LAYERS, TOP_K, NUM_EXPERTS, "int16")
    answer = {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5, 6, 7], "routed_experts": npy_text(ids)}
    dump = json_lines(tmp_path / "a.jsonl", [{"choices": [answer]}])
    command = ["trace", "import", str(dump), "-o", str(tmp_path / "t.parquet"), *OPTIONS]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "a.jsonl: line 1, choice 0: 4 rows of expert ids for 7 tokens; 6 are expected" in " ".join(error.split())
    assert main([*command, "--rows-at", "end"]) == 0
    trace = import_dump(dump, num_experts=NUM_EXPERTS, rows_at="end", limits=False)
    assert as_sets(trace.expert_ids[2:]) == as_sets(ids)
    assert as_sets(read_trace(tmp_path / "t.parquet").expert_ids) == as_sets(trace.expert_ids)
    with pytest.raises(InputError, match="rows_at"):
        import_dump(dump, num_experts=NUM_EXPERTS, rows_at="middle")  # type: ignore[arg-type]


def test_quoted_text_is_short_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def records(path: Path, known: ImportOptions) -> Any:
        raise InputError("odd\n\x1b[31m" + "x" * 5000)

    monkeypatch.setitem(FORMATS, "slime", types.SimpleNamespace(read=records))  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        list(import_files([tmp_path / "a"], "slime", KNOWN, Summary()))
    assert str(caught.value) == f"{tmp_path / 'a'}: odd??[31m{'x' * 491}"


def test_values_of_unexpected_kinds_are_refused_in_one_line(tmp_path: Path) -> None:
    odd = {"routed_experts": [1, 2]}
    (tmp_path / "a.pt").write_bytes(saved(odd))
    with pytest.raises(InputError, match=r"a\.pt: damaged, or not what its format says"):
        list(import_files([tmp_path / "a.pt"], "verl", KNOWN, Summary()))
    with pytest.raises(InputError, match="damaged, or not what its format says"):
        from_verl(odd, KNOWN)


def test_options_override_the_metadata_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(DUMPS["arrays:npz"].content)
    for options, experts in ((ImportOptions(), NUM_EXPERTS), (ImportOptions(200), 200)):
        (part,) = import_files([tmp_path / "a.npz"], "arrays", options, Summary())
        assert part.num_experts == experts


def test_a_model_supplies_facts_that_options_lack(tmp_path: Path) -> None:
    def known(model: str | None = None, **options: Any) -> ImportOptions:
        return with_model(ImportOptions(step=2, domain="maths", **options), model)

    config = {"model_type": "deepseek_v3", "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    config |= {"first_k_dense_replace": 1, "hidden_size": 8, "moe_intermediate_size": 8, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = known(model=str(tmp_path / "config.json"))
    assert (found.num_experts, found.num_layers, found.top_k, found.moe_layers) == (16, 4, 2, (1, 2, 3))
    assert (found.step, found.domain) == (2, "maths")
    assert found.model == load_model(str(tmp_path / "config.json")).name != ""
    assert known(model=str(tmp_path / "config.json"), num_layers=5).num_layers == 5
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": None, "first_k_dense_replace": 0}))
    found = known(model=str(tmp_path / "config.json"))
    assert (found.num_experts, found.num_layers, found.moe_layers) == (16, None, None)
    # Attention is nothing that routes depend on.
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": "many", "kv_lora_rank": 4}))
    assert known(model=str(tmp_path / "config.json"), num_experts=16).moe_layers == (1, 2, 3)
    assert known(top_k=3) == ImportOptions(top_k=3, step=2, domain="maths")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file"),
        (["{folder}/both.json"], "both.json: could be sglang or megatron; say which it is with --format"),
        (["{folder}/nothing.bin"], r"nothing.bin: looks like none of vllm, sglang.*recording of routes turned on"),
        (["{folder}/empty.jsonl"], "empty.jsonl: an empty file"),
        (["{folder}/utf16.jsonl"], "utf16.jsonl: text in UTF-16; convert it to UTF-8"),
        (["{folder}/utf16.jsonl", "--format", "vllm"], "utf16.jsonl: text in UTF-16; convert it to UTF-8"),
        (["{folder}/plain.jsonl"], "plain.jsonl: no response holds routed_experts.* --enable-return-routed-experts"),
        (["{folder}/nothing.bin", "{folder}/vllm.jsonl"], "nothing.bin: looks like none of vllm"),
        (["{folder}/vllm.jsonl", "--num-experts", "16", "-o", "{folder}/a.jsonl"], "a.jsonl: would hold Parquet; name"),
        (["{folder}/unknown"], "plain.jsonl: no response holds routed_experts"),
        (["{folder}/a.parquet"], "a.parquet: a Parquet file; a routing trace needs no import"),
        (["{folder}/vllm.jsonl"], r"vllm.jsonl: line 1.*: .*largest id: 15\).* --num-experts"),
        (["{folder}/vllm.jsonl", "--num-experts", "4"], "vllm.jsonl: line 1, .*they should be 0 to 3"),
        (["{folder}/vllm.jsonl", "--num-experts", "16", "--top-k", "3"], "top-2 routing; it should be top-3"),
        (["{folder}/vllm.jsonl", "--num-experts", "16", "--model", "qwen3-30b-a3b"], "is 16; qwen3-30b-a3b has 128"),
        (["{folder}/vllm.jsonl", "--model", "qwen3-30b-a3b"], "top-2 routing; it should be top-8"),
        (["{folder}/vllm.jsonl", "--model", "absent"], "absent"),
        (["{folder}/vllm.jsonl", "--format", "slime", "--num-experts", "16"], "vllm.jsonl: "),
        (["{folder}/sglang.jsonl", "--num-experts", "16"], "--num-layers"),
        (["{folder}/folder"], "folder: holds no"),
        (["{folder}/vllm.jsonl", "{folder}/sglang.jsonl"], "vllm.jsonl looks like vllm, .*sglang.jsonl like sglang"),
    ],
)
def test_invalid_arguments_give_one_line_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trimtab.api.import_dump.bounded_import", import_own_files)
    contents = {
        "nothing.bin": b"\x00\x01\x02 nothing", "both.json": b'{"meta_info": 1, "layer": 2, "top_indices": []}',
        "empty.jsonl": b"", "a.parquet": b"PAR1 and so on", "vllm.jsonl": DUMPS["vllm:jsonl"].content,
        "sglang.jsonl": DUMPS["sglang:int32"].content, "utf16.jsonl": '{"routed_experts": 1}'.encode("utf-16"),
        "plain.jsonl": b'{"choices": [{"token_ids": [1]}]}', "unknown/plain.jsonl": b'{"choices": []}' * 9,
        "unknown/README.txt": b"two dumps",
    }  # fmt: skip
    (tmp_path / "folder").mkdir()
    (tmp_path / "unknown").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "out" / "trace.parquet"
    words = [word.format(folder=tmp_path) for word in arguments]
    assert main(["trace", "import", "-o", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out/*"))


def test_a_dump_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump.jsonl"
    dump.write_bytes(DUMPS["vllm:jsonl"].content)
    (tmp_path / "link.parquet").symlink_to(dump)
    for output in ("dump.jsonl", "link.parquet"):
        assert main(["trace", "import", str(tmp_path), "-o", str(tmp_path / output), *OPTIONS]) == 2
        assert f"{output}: to be read and written" in capsys.readouterr().err
    assert dump.read_bytes() == DUMPS["vllm:jsonl"].content


@pytest.mark.longer
@pytest.mark.parametrize("name", [*DUMPS, "trimtab"])
def test_damaged_files_are_refused_in_one_line_or_read_whole(name: str, tmp_path: Path) -> None:
    """No other error, and nothing left behind."""
    rng = random.Random(name)
    dump = DUMPS.get(name) or Dump("trimtab", ".parquet", parquet_dump())
    file, out, refused = tmp_path / f"damaged{dump.suffix}", tmp_path / "out.parquet", 0
    file.write_bytes(dump.content)
    before = set(tmp_path.iterdir())
    for case in range(DAMAGED):
        file.write_bytes(damaged(dump.content, rng))
        out.unlink(missing_ok=True)
        try:
            if name == "trimtab":
                read_trace(file).check()
                continue
            # Half of them as the user says, half as the file looks.
            form = dump.form if rng.random() < 0.5 else format_of(file)
            write_trace(import_files([file], form, KNOWN, Summary()), out)
            read_trace(out).check()
        except InputError as error:
            refused += 1
            assert str(file) in str(error), case
            assert "\n" not in str(error), case
            assert len(str(error)) < 2000, case
            assert not out.exists(), case
    assert refused > DAMAGED / 10
    assert before <= set(tmp_path.iterdir()) <= {*before, out}


def response(seed: int = 0, *, layers: int = 48, top_k: int = 8, experts: int = 128, **more: Any) -> dict[str, Any]:
    ids = plain_routes(6, layers, top_k, experts, "uint8", seed=seed)
    return {
        "id": "a",
        "model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "choices": [{"routed_experts": npy_text(ids)}],
    } | more


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Imports files, and returns the status and what is written to stderr."""

    def run(*words: object) -> tuple[int, str]:
        status = main(["trace", "import", *map(str, words), "-o", str(tmp_path / "out" / "t.parquet")])
        return status, capsys.readouterr().err

    return run


def test_steps_come_from_file_names_and_records_come_first(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    for step, rank in [(3, 0), (3, 1), (12, 0), (12, 1)]:
        (tmp_path / f"step{step}").mkdir(exist_ok=True)
        more = {"step": 7} if (step, rank) == (12, 1) else {}
        json_lines(tmp_path / f"step{step}" / f"rank{rank}.jsonl", [response(step + rank, **more)])
    files = sorted(tmp_path.glob("step*/*"))
    status, notes = run(*files, "--step-from", r"step(\d+)")
    assert (status, "no step is recorded" in notes) == (0, False)
    trace = read_trace(tmp_path / "out" / "t.parquet")
    expected = {12: 12, 13: 7, 3: 3, 4: 3}
    assert trace.steps.tolist() == list(expected.values())
    for index, seed in enumerate(expected):
        assert np.array_equal(
            np.sort(trace.sequence(index), axis=2), np.sort(plain_routes(6, 48, 8, 128, "uint8", seed=seed), axis=2)
        )
    same = import_dump(files, step_from=r"step(\d+)", limits=False)
    assert np.array_equal(same.steps, trace.steps)
    assert np.array_equal(np.sort(same.expert_ids, axis=2), np.sort(trace.expert_ids, axis=2))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"step(\d+)", "a.jsonl: no step in its name by --step-from"),
        (r"(a)\.jsonl", "a.jsonl: no step in its name by --step-from"),
        (r"step\d+", "has 0 groups; it should have one, the step, as in step"),
        (r"(step)(\d+)", "has 2 groups"),
        (r"step(\d+", "is no regular expression (missing )"),
    ],
)
def test_patterns_without_a_step_are_one_line(
    pattern: str, message: str, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    status, error = run(json_lines(tmp_path / "a.jsonl", [response()]), "--num-experts", 128, "--step-from", pattern)
    assert (status, message in error, error.count("\n")) == (2, True, 1)


def test_a_note_says_that_no_step_is_recorded(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    file, later = (
        json_lines(tmp_path / "a.jsonl", [response()]),
        json_lines(tmp_path / "b.jsonl", [response(step=2)]),
    )
    assert "no step is recorded, so all sequences are of step 0" in run(file)[1]
    assert "no step" not in run(file, later)[1]
    assert "no step" not in run(file, "--step", 0)[1]


def test_the_model_that_a_dump_names_is_the_default(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    file = json_lines(tmp_path / "a.jsonl", [response()])
    status, notes = run(file)
    assert (status, "model: qwen3-30b-a3b, as the dump names it (Qwen/Qwen3-30B-A3B-Instruct-2507)" in notes) == (
        0,
        True,
    )
    assert read_trace(tmp_path / "out" / "t.parquet").model == import_dump(file).model == "qwen3-30b-a3b"
    # What is given comes first, also for a dump that is not of the model.
    cut = json_lines(tmp_path / "b.jsonl", [response(layers=4, top_k=4, experts=16)])
    assert import_dump(cut, num_experts=16).num_experts == 16
    with pytest.raises(InputError, match="top-4 routing; it should be top-8"):
        import_dump(cut)
    for named in ("own-model", "", None, ["a"]):
        unknown = json_lines(tmp_path / "c.jsonl", [response(model=named)])
        with pytest.raises(InputError, match="number of experts per layer is unknown"):
            import_dump(unknown)


def test_a_note_names_the_record_of_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimtab")
    responses = [response(model=name) for name in ("qwen3-30b-a3b", "qwen3-30b-a3b", "", None, "other", "third")]
    file = json_lines(tmp_path / "a.jsonl", responses)
    assert import_dump(file, limits=False).num_sequences == 6
    note = f"{file}: line 5, choice 0: of model other; those before it are of qwen3-30b-a3b"
    assert [each for each in caplog.messages if "of model" in each] == [note]


def test_files_beside_dumps_are_left_out_and_noted(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for name in ("A.txt", "B.txt", "_SUCCESS", "metrics.json"):
        (folder / name).write_text('{"model": "mixtral-8x7b"}' if name == "metrics.json" else "")
    file = json_lines(folder / "r.jsonl", [response()])
    status, notes = run(folder)
    note = "left out, since they look like no known format: A.txt, B.txt, _SUCCESS and 1 more"
    assert (status, note in notes.splitlines()) == (0, True)
    assert read_trace(tmp_path / "out" / "t.parquet").num_sequences == 1
    assert import_dump(folder / "*", limits=False).model == "qwen3-30b-a3b"
    with pytest.raises(InputError, match=r"A\.txt: an empty file"):
        import_dump([file, folder / "A.txt"], limits=False)


def test_text_is_no_model(tmp_path: Path) -> None:
    text = json.dumps({"text": 'the "model": "mixtral-8x7b"', "model": "glm-4.5-air", "routed_experts": []})
    (tmp_path / "a.jsonl").write_text(text)
    assert model_label(tmp_path / "a.jsonl") == "glm-4.5-air"
    assert model_label(tmp_path / "absent") == model_label(tmp_path) == ""


def test_without_limits_no_process_is_started(
    tmp_path: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert run(json_lines(tmp_path / "a.jsonl", [response()]), "--no-limits")[0] == 0
    (tmp_path / "b.jsonl").write_text('{"routed_experts": ')
    status, error = run(tmp_path / "b.jsonl", "--no-limits", "--num-experts", 4)
    assert (status, "b.jsonl" in error, error.count("\n")) == (2, True, 1)
