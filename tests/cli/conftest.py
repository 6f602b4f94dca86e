"""Commands in this process, and a trace for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab import write_trace
from trimtab.cli.main import main
from trimtab.trace import synthesize


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which succeeds, and returns what it prints."""

    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which is refused, and returns its error of one line."""

    def run(*words: object) -> str:
        try:
            status = main([str(word) for word in words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, error = capsys.readouterr()
        assert (status, out, error.count("\n")) == (2, "", 1)
        return error

    return run


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    trace = synthesize(num_sequences=32, sequence_length=64, num_layers=2, num_experts=32, top_k=4, zipf=0.9)
    write_trace(trace, tmp_path / "trace.parquet")
    return tmp_path / "trace.parquet"
