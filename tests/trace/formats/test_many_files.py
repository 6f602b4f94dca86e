"""Dumps of many files: steps from their names, the model that they name, and imports without limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.response_dumps import json_lines, npy_text, routes
from trimtab import InputError, import_dump, read_trace
from trimtab.cli.main import main
from trimtab.trace.formats.importing import model_label


def response(seed: int = 0, *, layers: int = 48, top_k: int = 8, experts: int = 128, **more: Any) -> dict[str, Any]:
    ids = routes(6, layers, top_k, experts, "uint8", seed=seed)
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
            np.sort(trace.sequence(index), axis=2), np.sort(routes(6, 48, 8, 128, "uint8", seed=seed), axis=2)
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
    file, later = json_lines(tmp_path / "a.jsonl", [response()]), json_lines(tmp_path / "b.jsonl", [response(step=2)])
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


def test_text_is_no_model(tmp_path: Path) -> None:
    text = json.dumps({"text": 'the "model": "mixtral-8x7b"', "model": "glm-4.5-air"})
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
