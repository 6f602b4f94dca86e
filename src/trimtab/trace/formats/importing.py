"""Detection of a file's format, and conversion of its records to parts of a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trimtab.errors import InputError
from trimtab.messages import note_once
from trimtab.trace.containers.json_values import UTF16, UTF16_MARKS, json_head
from trimtab.trace.formats import (
    arrays,
    counts,
    homemade,
    megatron,
    nemo_rl,
    sglang,
    sglang_recorder,
    slime,
    verl,
    vllm,
)
from trimtab.trace.formats.dump_fields import damaged_values
from trimtab.trace.formats.normalise import Summary, normalise
from trimtab.trace.formats.plausible import Plausibility
from trimtab.trace.formats.records import Dropped, ImportOptions, Record
from trimtab.trace.formats.responses import NO_ROUTES
from trimtab.trace.formats.turns import merged
from trimtab.trace.message_text import few_of, printable, reason
from trimtab.trace.routing import RoutingTrace

LONGEST_REASON = 500  # characters
# The model's name in the first response of a JSON file. Quotes inside of a text have a backslash, so they don't match.
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')


class Format(Protocol):
    """Interface of each framework's module; one whose files state facts of the model has `read_metadata(path)`, too."""

    def recognise(self, path: Path) -> bool:
        """True if a file looks like this format. Reads little of it, and never raises."""

    def read(self, path: Path, options: ImportOptions) -> Iterator[Record | Dropped]:
        """Yields the records of a file.

        Raises:
            InputError: in one line, without the file's name: what is wrong, and where; also if no sequence has routes.
                What values of unexpected kinds raise is converted (`damaged_values`).
        """


# Of a file that is of no other format.
HOMEMADE = "home-made"
FORMATS: dict[str, Format] = {
    "vllm": vllm,
    "sglang": sglang,
    "sglang-recorder": sglang_recorder,
    "verl": verl,
    "slime": slime,
    "nemo-rl": nemo_rl,
    "megatron": megatron,
    "arrays": arrays,
    "counts": counts,
    HOMEMADE: homemade,
}


class UnknownFormatError(InputError):
    """A file looks like no format."""


def format_of(path: Path) -> str:
    """The name of the format that a file looks like.

    Raises:
        UnknownFormatError: if it looks like none.
        InputError: if it looks like several.
    """
    fitting = [name for name, form in FORMATS.items() if name != HOMEMADE and form.recognise(path)]
    if not fitting and homemade.recognise(path):
        return HOMEMADE
    if not fitting:
        raise UnknownFormatError(f"{path}: {_unknown(path)}")
    if len(fitting) > 1:
        raise InputError(f"{path}: could be {' or '.join(fitting)}; say which it is with --format")
    return fitting[0]


def _unknown(path: Path) -> str:
    """What is wrong with a file that looks like no format, and what would be right."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "an empty file"
    if start == b"PAR1":
        return "a Parquet file; a routing trace needs no import"
    if start[:2] in UTF16_MARKS:
        return UTF16
    head = json_head(path)
    if b'"choices"' in head or b'"token_ids"' in head:
        return NO_ROUTES
    names = ", ".join(FORMATS)
    return (
        f"looks like none of {names}; was recording of routes turned on? If so, say which it is with --format, or "
        "write what can be read: numpy.savez('routes.npz', *arrays), an array [tokens, layers, top_k] a sequence"
    )


def common_format(
    files: Sequence[Path],
    optional: Collection[Path] = (),
    begin: Callable[[Path], None] = lambda file: None,
    note: Callable[[str], None] = note_once,
) -> tuple[str, list[Path]]:
    """The format that all files look like, and the files without optional ones that look like none.

    Args:
        begin: called with each file before it is read.
        note: called with a line that names the files that are left out.

    Raises:
        InputError: as `format_of`, if no file is left, or if formats differ.
    """
    forms: dict[Path, str] = {}
    unknown: dict[Path, InputError] = {}
    for file in files:
        begin(file)
        try:
            forms[file] = format_of(file)
        except UnknownFormatError as error:
            unknown[file] = error
            if file not in optional:
                raise
    if not forms:
        # A dump is larger than what is beside it.
        raise unknown[max(unknown, key=lambda file: file.stat().st_size)]
    if unknown:
        note(f"left out, since they look like no known format: {few_of([file.name for file in unknown])}")
    (first, form), *others = forms.items()
    for file, other in others:
        if other != form:
            raise InputError(f"{first} looks like {form}, {file} like {other}; import them one by one")
    return form, list(forms)


def import_files(
    files: Sequence[Path],
    form: str,
    options: ImportOptions,
    summary: Summary,
    begin: Callable[[Path], None] = lambda file: None,
) -> Iterator[RoutingTrace]:
    """Yields the files of one dump, in order, as parts of a trace; one part in memory at a time.

    Untrusted files are imported by `bounded_import`, which limits memory and time.

    Args:
        form: a key of `FORMATS`.
        summary: its counts are increased.
        begin: called with each file before it is read.

    Raises:
        InputError: one line that names the file and the place in it.
    """
    if read_metadata := getattr(FORMATS[form], "read_metadata", None):
        with _naming(files[0]):
            options = options.with_default(read_metadata(files[0]))
    name = f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")

    def read() -> Iterator[Record | Dropped]:
        return _records(files, FORMATS[form], options, begin)

    return _noted(merged(read, options) if options.merge_turns else read(), options, summary, name)


def import_own_files(
    files: Sequence[Path], form: str | None, options: ImportOptions, summary: Summary
) -> Iterator[RoutingTrace]:
    """As `bounded_import`, for files that are trusted: in this process, without limits."""
    summary.format, files = (form, files) if form else common_format(files, options.optional)
    yield from import_files(files, summary.format, options, summary)


def model_label(path: Path) -> str:
    """The model that a JSON file names near its start, as servers do in each response; "" if it names none.

    Little of the file is read. Other files than responses may name another model.
    """
    head = json_head(path) if path.is_file() else b""
    found = _MODEL.search(head) if b"routed_experts" in head else None
    return found[1].decode("utf-8", "replace") if found else ""


def step_in(path: Path, pattern: str) -> int:
    """The step that a file's path names.

    Args:
        pattern: a regular expression; its group is the step.

    Raises:
        InputError: if the path does not match.
    """
    found = re.search(pattern, str(path))
    if not found or not found[1].isascii() or not found[1].isdigit():
        raise InputError(f"{path}: no step in its name by --step-from {pattern!r}; its group should match a number")
    return int(found[1])


def trace_of(records: Iterable[Record | Dropped], options: ImportOptions) -> RoutingTrace:
    """Returns one trace of records in memory."""
    summary = Summary()
    with damaged_values():
        trace = RoutingTrace.concatenate(list(_noted(records, options, summary)))
    return replace(trace, notes=summary.notes)


def _noted(
    records: Iterable[Record | Dropped], options: ImportOptions, summary: Summary, name: str = "the records"
) -> Iterator[RoutingTrace]:
    """As `normalise`; at the end the summary has what is odd."""
    odd = Plausibility()
    yield from normalise(records, options, summary, name, odd)
    summary.agreement = odd.agreement
    summary.notes += tuple(odd.notes(dropped=options.drop_repeats))


def _records(
    files: Sequence[Path], form: Format, options: ImportOptions, begin: Callable[[Path], None]
) -> Iterator[Record | Dropped]:
    for file in files:
        begin(file)
        step = step_in(file, options.step_from) if options.step_from else 0
        with _naming(file):
            for record in form.read(file, options):
                if isinstance(record, Record):
                    record = replace(record, where=f"{file}: {record.where}", step=record.step or step)
                yield record


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Converts every error into a one-line InputError that names the file."""
    try:
        with damaged_values():
            yield
    except InputError as error:
        raise InputError(f"{file}: {printable(str(error)[:LONGEST_REASON])}") from None
    except OSError as error:
        raise InputError(f"{file}: can't be read ({reason(error)})") from None
