"""Coverage-guided fuzzing of the importers: every input is imported, or refused with an `InputError`.

    python tests/reliability/fuzz_imports.py --seconds 600 --corpus out/fuzz

The first inputs are a valid dump of every format. An input that reaches new code is kept in the corpus, and changed
further. Any other exception, a minute of work or 2 GB of memory for a few kilobytes ends the run with status 1, and
the input is kept. Afterwards the lines of the readers that the corpus reaches are counted.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

READERS = ("trimtab/trace/containers/", "trimtab/trace/formats/")
# A first byte from which on the rest is a pickle.
_IN_TORCH_FILE = 128


def fuzz(corpus: Path, seconds: int) -> None:
    """Runs until the time is over or an input fails; does not return."""
    import atheris

    # numba does not compile instrumented kernels. Of the readers these two modules have some.
    import trimtab.trace

    kernels = ["trimtab.trace.formats.normalise", "trimtab.trace.formats.megatron"]
    with atheris.instrument_imports(include=["trimtab.trace"], exclude=kernels):
        import trimtab.trace.formats.bounded_import  # noqa: F401

    read = _reader(corpus.parent / "input")
    atheris.Setup(
        [sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=16384",
         "-print_final_stats=1", f"-artifact_prefix={corpus.parent}/failed-"],
        read,
    )  # fmt: skip
    atheris.Fuzz()


def _reader(file: Path) -> Any:
    """A function that imports bytes as a user's file.

    The first byte tells whether the format is detected, or which it is, and whether the rest is a file or the pickle
    in a torch file: changed bytes in a zip file are found by its checksums, which nothing would get past.
    """
    from trimtab import InputError
    from trimtab.trace.formats import bounded_import, importing
    from trimtab.trace.formats.normalise import Summary
    from trimtab.trace.formats.records import ImportOptions

    names = [None, *importing.FORMATS]
    options = ImportOptions(num_experts=16, num_layers=4, top_k=2)
    bounded_import.compile_kernels()

    def read(content: bytes) -> None:
        if not content:
            return
        file.write_bytes(_torch_file(content[1:]) if content[0] >= _IN_TORCH_FILE else content[1:])
        try:
            form = names[content[0] % _IN_TORCH_FILE % len(names)] or importing.common_format([file])[0]
            for part in importing.import_files([file], form, options, Summary()):
                part.check()
        except InputError as error:
            if "\n" in str(error) or str(file) not in str(error):
                raise RuntimeError(f"a message of several lines, or without the file: {error}") from None
        except MemoryError:
            pass  # An import reports it in one line.

    return read


def _torch_file(pickled: bytes) -> bytes:
    """A torch file of any pickle, with eight storages."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("dump/data.pkl", pickled)
        for key in range(8):
            archive.writestr(f"dump/data/{key}", bytes(range(16)) * 64)
    return file.getvalue()


def seeds(corpus: Path) -> None:
    """Write a valid dump of every format, to be detected and by name, and the pickles of the torch files among them."""
    from helpers.every_dump import all_dumps
    from trimtab.trace.formats.importing import FORMATS

    corpus.mkdir(parents=True, exist_ok=True)
    names = [None, *FORMATS]
    for name, dump in all_dumps().items():
        for form in (None, dump.form):
            (corpus / f"seed-{name}-{form}").write_bytes(bytes([names.index(form)]) + dump.content)
        if dump.suffix == ".pt":
            archive = zipfile.ZipFile(io.BytesIO(dump.content))
            pickled = archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))
            (corpus / f"seed-{name}-pickle").write_bytes(bytes([_IN_TORCH_FILE + names.index(dump.form)]) + pickled)


def lines_reached(corpus: Path) -> dict[str, tuple[int, int]]:
    """For each file of the readers, lines that importing the corpus runs, and all lines."""
    import trimtab.trace.formats.importing as first

    read = _reader(corpus.parent / "input")
    root = Path(first.__file__).parents[3]
    reached: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(each in name for each in READERS):
            return None
        reached.setdefault(name, set()).add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    for path in sorted(corpus.iterdir()):
        read(path.read_bytes())
    sys.settrace(None)
    return {
        str(path.relative_to(root)): (len(reached.get(str(path), set()) & lines), len(lines))
        for folder in READERS
        for path in sorted((root / folder).glob("*.py"))
        if (lines := _lines(compile(path.read_text(), str(path), "exec")))
    }


def _lines(code: CodeType) -> set[int]:
    """Lines of the functions of a module; the module's own run at its import, and kernels are compiled."""
    found: set[int] = set()
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found |= {line for _, _, line in part.co_lines() if line and line > part.co_firstlineno} | _lines(part)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, default=Path("out/fuzz/corpus"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        fuzz(options.corpus, options.seconds)
    seeds(options.corpus)
    command = [sys.executable, __file__, "--child", "--seconds", str(options.seconds), "--corpus", str(options.corpus)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{ended.stderr[-4000:]}\nan input failed; it is kept in {options.corpus.parent}")
    inputs = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
    lines = lines_reached(options.corpus)
    for name, (reached, total) in lines.items():
        print(f"{reached:5} of {total:4}  {name}")
    reached, total = (sum(each) for each in zip(*lines.values(), strict=True))
    print(f"{int(inputs[1]) if inputs else 0:,} inputs, {len(os.listdir(options.corpus)):,} kept; "
          f"{reached} of {total} lines ({reached / total:.0%})")  # fmt: skip


if __name__ == "__main__":
    main()
