"""`trimtab.import_dump`: routing that a framework recorded, as a trace."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

from trimtab.api import run_kinds
from trimtab.api.model_choice import ModelSource, Overrides
from trimtab.api.run import checked
from trimtab.cluster import ModelSpec, load_model, preset_of_label
from trimtab.errors import InputError
from trimtab.kinds import choice, part, positive, switch, text, whole
from trimtab.trace import RoutingTrace
from trimtab.trace.formats.bounded_import import bounded_import
from trimtab.trace.formats.importing import FORMATS, import_own_files, model_label
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ROWS_AT, ImportOptions
from trimtab.trace.message_text import printable
from trimtab.trace.numbering import Numbering
from trimtab.trace.store import Source, found_files, named_files

log = logging.getLogger("trimtab")


def import_dump(
    source: Source,
    *,
    format: Annotated[str | None, choice(*FORMATS)] = None,
    model: Annotated[ModelSource | None, run_kinds.model] = None,
    overrides: Annotated[Overrides, run_kinds.config_value] = (),
    num_experts: Annotated[int | None, positive] = None,
    num_layers: Annotated[int | None, positive] = None,
    top_k: Annotated[int | None, positive] = None,
    step: Annotated[int, whole] = 0,
    step_from: Annotated[str, text] = "",
    domain: Annotated[str, text] = "",
    rows_at: Annotated[Literal["start", "end"] | None, choice(*ROWS_AT)] = None,
    sampled: Annotated[float, part] = 1.0,
    drop_repeats: Annotated[bool, switch] = False,
    merge_turns: Annotated[bool, switch] = False,
    limits: Annotated[bool, switch] = True,
) -> RoutingTrace:
    """Read the routing that an RL or serving framework recorded, as a trace.

    A child process with limits of memory and time reads the files, which may come from a stranger.

    Args:
        source: a path (file, folder or pattern), or a list of paths: one dump, in this order.
        format: format of the dump; by default detected.
        model: a preset, its hub id, a config.json, a checkpoint folder or a `ModelSpec`; by default the dump's if it is
            known, else experts, layers and top-k are needed.
        overrides: other values of keys of the model's config, such as num_hidden_layers=24; by default none.
        num_experts: experts of a layer; by default the model's.
        num_layers: decoder layers, with and without experts; by default the model's.
        top_k: experts of a token; by default the model's.
        step: RL step of sequences without one.
        step_from: regular expression whose group is the step in a file's path, such as 'step(\\d+)', of sequences
            without one; ranks of a step may have files of their own; by default none.
        domain: label of sequences without one; by default none.
        rows_at: where rows for a part of a sequence are, if the dump does not tell; by default such rows are refused.
        sampled: the part of each step's sequences that was recorded.
        drop_repeats: take routes as unknown that repeat the row before in all layers or are 0 to K-1: warm-up, padding.
        merge_turns: of sequences that are the beginning of a longer one keep the longest, with the rows of the others
            where it has none: turns of a conversation. The dump is read twice.
        limits: False: for your own files, no limits of memory and processor time, and no process of their own.

    Raises:
        InputError: one line that names the file and the place in it, if the dump is of no known format, is damaged, is
            not of the model, or takes more than the limits.
    """
    parts, summary = read_dump(source, locals())
    trace = RoutingTrace.concatenate(list(parts))
    for note in summary.notes:
        log.info("%s", note)
    return replace(trace, notes=summary.notes)


def read_dump(source: Source, arguments: Mapping[str, Any]) -> tuple[Iterator[RoutingTrace], Summary]:
    """Parts of the trace of a dump, and a summary that is complete when they were read.

    Args:
        arguments: of `import_dump`; others are left alone.
    """
    defaults = {name: each.default for name, each in signature(import_dump).parameters.items() if name != "source"}
    given = checked(import_dump, {name: arguments.get(name, default) for name, default in defaults.items()})
    files, summary = named_files(source, "*"), Summary()
    taken = {name: given[name] for name in given.keys() & ImportOptions.__dataclass_fields__.keys() - {"model"}}
    options = ImportOptions(**taken, optional=found_files(source, files))
    check_pattern(options.step_from)
    model = given["model"]
    options = with_model(options, model or named_model(files, options), given["overrides"])
    numbering = numbering_of(model)
    read = bounded_import if given["limits"] else import_own_files
    return (replace(part, numbering=numbering) for part in read(files, given["format"], options, summary)), summary


def numbering_of(model: ModelSource | None) -> Numbering | None:
    """The numbering of a checkpoint's folder; None of any other model."""
    if model is None or isinstance(model, ModelSpec) or not Path(model).is_dir():
        return None
    return Numbering.of_checkpoint(Path(model))


def check_pattern(text: str) -> None:
    """Raise InputError unless the text is empty, or a regular expression with one group."""
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise InputError(f"step_from: {text!r} is no regular expression ({error})") from None
    if text and groups != 1:
        raise InputError(f"step_from: {text!r} has {groups} groups; it should have one, the step, as in step(\\d+)")


def named_model(files: Sequence[Path], options: ImportOptions) -> str | None:
    """The preset that the first model's name means, if the number of experts is not given; a line is logged."""
    if options.num_experts is not None:
        return None
    label = next(filter(None, map(model_label, files)), "")
    preset = preset_of_label(label) if label else None
    if preset:
        log.info("model: %s, as the dump names it (%s); --model gives another", preset, printable(label))
    return preset


def with_model(options: ImportOptions, source: ModelSource | None, overrides: Overrides = ()) -> ImportOptions:
    """The options, completed by the facts of the model.

    Raises:
        InputError: if the options are not of the model, or there are overrides without a model.
    """
    overrides = dict(overrides)
    if not source:
        if overrides:
            raise InputError(f"--set {next(iter(overrides))}: needs --model")
        return options
    model = source if isinstance(source, ModelSpec) else load_model(source, overrides, routing_alone=True)
    if model.zero_experts:
        raise InputError(
            f"{model.name}: its router also chooses among {model.zero_experts} zero experts, which no rank computes; "
            "dumps with such ids are not supported"
        )
    layers = model.moe_layers + model.dense_layers if model.moe_layer_indices else None
    for option, value, of_model in (
        ("--num-experts", options.num_experts, model.num_experts),
        ("--top-k", options.top_k, model.top_k),
    ):
        if value not in (None, of_model):
            raise InputError(f"{option} is {value}; {model.name if source is model else source} has {of_model}")
    return replace(
        options,
        num_experts=model.num_experts,
        num_layers=options.num_layers or layers,
        top_k=model.top_k,
        moe_layers=model.moe_layer_indices or None,
        model=model.name,
    )
