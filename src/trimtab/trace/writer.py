"""`TraceWriter`: appends to a trace on disk during a rollout; readable after a crash."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType

from trimtab.errors import InputError
from trimtab.trace.routing import RoutingTrace
from trimtab.trace.store import ROW_GROUP_BYTES, TraceReader, write_trace


class TraceWriter:
    """Appends sequences to a folder of trace files, which is read as one trace at any time.

    Sequences are buffered up to `file_bytes` of ids and then written to a new file, atomically. After a crash all files
    are readable; buffered sequences, at most a file, are lost. New files are added to an existing folder.

    Several processes may write to one folder, each with its own name.

    Args:
        folder: created if missing.
        name: what file names begin with, such as "rank-3".
        file_bytes: ids of a file. Memory is about four times that.

    Attributes:
        written_bytes: of all files of this writer.

    Raises:
        InputError: by `append`, if the model is not that of the sequences before.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, name: str = "part", file_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        self.folder = Path(folder)
        self._file_bytes = file_bytes
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: a file; a trace that grows is a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        # Not those of a longer name with the same prefix: "rank" and "rank-3" are two writers.
        ours = (re.fullmatch(rf"{re.escape(name)}-(\d+)\.parquet", file.name) for file in self.folder.iterdir())
        before = {int(match[1]): self.folder / match[0] for match in ours if match}
        self._next = max(before, default=-1) + 1
        self._model = TraceReader(before[self._next - 1]).empty if before else None
        self._waiting: list[RoutingTrace] = []
        self.written_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of ids that are buffered."""
        return sum(part.expert_ids.nbytes for part in self._waiting)

    def append(self, sequences: RoutingTrace) -> None:
        """Add sequences; a file is written when there is enough data for one."""
        self._model = self._model or sequences.part(0, 0)
        self._model.check_same_model(sequences)
        self._waiting.append(sequences)
        if self.waiting_bytes >= self._file_bytes:
            self.flush()

    def flush(self) -> None:
        """Write all buffered sequences."""
        if any(part.num_sequences for part in self._waiting):
            path = self.folder / f"{self._name}-{self._next:06d}.parquet"
            write_trace(RoutingTrace.concatenate(self._waiting), path)
            self.written_bytes += path.stat().st_size
            self._next += 1
        self._waiting.clear()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
