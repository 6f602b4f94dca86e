"""Checkpoints of a run: the Hugging Face layout, and in `trainer/` the state that a resumed run needs.

It reads and writes files on one rank, without communication.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trimtab.errors import InputError
from trimtab.rl.demo_model import save_checkpoint
from trimtab.runtime.state.logical_state import StateValue

FORMAT = "trimtab-checkpoint-2"
FILE_BYTES = 2 << 30
ALGORITHM_FILE = "trainer/algorithm.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        directory: of the checkpoint; vanilla transformers loads it.
        step: RL steps done.
        held_out_accuracy: measured so far, by the time of measurement.
        optimizer_files: number of files with the optimizer's state.
        homes: `[L][E]` home rank of every expert. A run with the same number of ranks needs them to continue bit for
            bit.
        checksums: SHA-256 of every other file, by its path in the directory.
    """

    directory: Path
    step: int
    held_out_accuracy: dict[str, float]
    optimizer_files: int
    homes: list[list[int]]
    checksums: dict[str, str]

    def check_files(self) -> None:
        """Compare all files with their checksums. Reads them once.

        Raises:
            InputError: naming a file that is missing or damaged.
        """
        for name, checksum in self.checksums.items():
            file = self.directory / name
            if not file.is_file():
                problem = "it is missing"
            elif _checksum(file) != checksum:
                problem = "it has changed since it was written"
            else:
                continue
            raise InputError(
                f"{file}: {problem}; restore it, or remove {self.directory} to continue from the checkpoint before"
            )

    def optimizer_state(self) -> Mapping[str, Mapping[str, StateValue]]:
        """Optimizer state by parameter name, for `LogicalState.load_optimizer_state`. Each entry is read when accessed.

        Raises:
            InputError: naming a file that is missing or damaged.
        """
        return _OptimizerFiles([_optimizer_file(self.directory, number) for number in range(self.optimizer_files)])

    def algorithm_state(self) -> dict[str, torch.Tensor]:
        """State of the algorithm by name, as `Trainer.algorithm_state` returned it; empty for one without state.

        Raises:
            InputError: naming a file that is missing or damaged.
        """
        if ALGORITHM_FILE not in self.checksums:
            return {}
        with _opened(self.directory / ALGORITHM_FILE) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def last_checkpoint(out: Path) -> Checkpoint | None:
    """The last complete checkpoint of a run, if there is one.

    Raises:
        InputError: if its `trainer/state.json` is damaged or does not have the format of this version.
    """
    steps = (re.fullmatch(r"step-(\d{5,})", path.name) for path in out.glob("checkpoints/step-*/"))
    for step in sorted((int(match[1]) for match in steps if match), reverse=True):
        directory = _directory(out, step)
        file = directory / "trainer" / "state.json"
        if file.is_file():
            try:
                state = json.loads(file.read_text())
                checksum = state.pop("checksum")
                if (state["format"], state["step"], checksum) != (FORMAT, step, _checksum_of_state(state)):
                    raise ValueError
                accuracy, files = dict(state["held_out_accuracy"]), int(state["optimizer_files"])
                return Checkpoint(directory, step, accuracy, files, list(state["homes"]), dict(state["checksums"]))
            except (KeyError, TypeError, ValueError):
                raise InputError(f"{file}: expected the state of a run after {step} steps, as {FORMAT!r}") from None
    return None


def write_checkpoint(
    out: Path,
    step: int,
    held_out_accuracy: dict[str, float],
    homes: list[list[int]],
    config: Any,
    tokenizer: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    optimizer_state: Iterable[tuple[str, Mapping[str, StateValue]]],
    algorithm_state: dict[str, torch.Tensor],
) -> None:
    """Write a checkpoint to `out/checkpoints`. Writes are atomic, even if the machine fails.

    Args:
        out, step, held_out_accuracy, homes: as in `Checkpoint`.
        config, tokenizer: of the model.
        weights, optimizer_state: in logical expert order. The optimizer's state is written while it is iterated, so
            memory holds at most one file of it.
        algorithm_state: of the algorithm; may be empty.

    Raises:
        InputError: if safetensors can't write a file, for example on a full disk.
    """
    with _atomic_directory(_directory(out, step)) as partial:
        save_checkpoint(config, dict(weights), tokenizer, partial)
        (partial / "trainer").mkdir()
        if algorithm_state:
            save_file(algorithm_state, partial / ALGORITHM_FILE)
        state: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "held_out_accuracy": held_out_accuracy,
            "optimizer_files": _write_optimizer(optimizer_state, partial),
            "homes": homes,
        }
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        state["checksums"] = {str(path.relative_to(partial)): _checksum(path) for path in files}
        state["checksum"] = _checksum_of_state(state)
        (partial / "trainer" / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def remove_unfinished(out: Path) -> None:
    """Remove incomplete checkpoints and files, which a stopped run may have left."""
    for path in list(out.rglob(".*.partial")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _directory(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:05d}"


def _optimizer_file(directory: Path, number: int) -> Path:
    return directory / "trainer" / f"optimizer-{number:05d}.safetensors"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of_state(state: dict[str, Any]) -> str:
    """Of the other values in `trainer/state.json`."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


@contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """A hidden folder to fill, which is synced to disk and renamed to `directory` at the end."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(partial, directory)
        _sync(directory.parent)
    except SafetensorError as error:
        raise InputError(
            f"{directory}: can't be written ({error}); when that is solved, continue with --resume"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_optimizer(state: Iterable[tuple[str, Mapping[str, StateValue]]], directory: Path) -> int:
    """Write files of at most `FILE_BYTES` or one parameter, and return how many.

    A tensor's name is its key in the state, a slash, and its parameter's name.
    """
    files = 0
    waiting: dict[str, torch.Tensor] = {}
    for name, values in state:
        tensors = {f"{key}/{name}": torch.as_tensor(value).contiguous() for key, value in values.items()}
        if waiting and sum(tensor.nbytes for tensor in (*waiting.values(), *tensors.values())) > FILE_BYTES:
            save_file(waiting, _optimizer_file(directory, files))
            files, waiting = files + 1, {}
        waiting |= tensors
    save_file(waiting, _optimizer_file(directory, files))
    return files + 1


class _OptimizerFiles(Mapping[str, Mapping[str, StateValue]]):
    """Optimizer state by parameter name and key, read from the files that `_write_optimizer` wrote."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, dict[str, Path]] = {}
        for path in paths:
            with _opened(path) as file:
                for stored in file.keys():  # noqa: SIM118
                    key, name = stored.split("/", 1)
                    self._files.setdefault(name, {})[key] = path

    def __getitem__(self, name: str) -> Mapping[str, StateValue]:
        values = {}
        for key, path in self._files[name].items():
            with _opened(path) as file:
                values[key] = file.get_tensor(f"{key}/{name}")
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})") from None
