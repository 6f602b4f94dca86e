"""`trimtab.import_dump`: routing that a framework recorded, as a trace."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trimtab.api.arguments import ModelSource, Overrides, check_choice, check_optional, check_whole
from trimtab.cluster import ModelSpec, load_model, preset_of_label
from trimtab.errors import InputError
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
    format: str | None = None,
    model: ModelSource | None = None,
    overrides: Overrides = (),
    num_experts: int | None = None,
    num_layers: int | None = None,
    top_k: int | None = None,
    step: int = 0,
    step_from: str = "",
    domain: str = "",
    rows_at: Literal["start", "end"] | None = None,
    drop_repeats: bool = False,
    merge_turns: bool = False,
    limits: bool = True,
) -> RoutingTrace:
    """Returns the routing that an RL or serving framework recorded, as `trimtab trace import` writes it.

    A child process with limits of memory and time reads the files, which may come from a stranger.

    Args:
        source: a path (file, folder or pattern), or a list of paths: one dump, in this order.
        format: of the dump, see `trimtab trace import --help`; by default detected.
        model: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint: experts, layers and top-k, and
            which layers have experts. By default they are given one by one, or in the dump, or those of the preset that
            the dump's responses name.
        overrides: keys of the model's config with other values.
        num_experts, num_layers, top_k: without a model; `num_layers` are decoder layers, with and without experts.
        step: RL step of sequences without one.
        step_from: a regular expression with one group, the step of a file's sequences without one, such as
            `step(\\d+)`; searched in its path.
        domain: label of sequences without one.
        rows_at: where rows for a part of a sequence are if the dump does not tell: at its "start" or its "end"; by
            default they are refused.
        drop_repeats: take routes of rows as unknown that repeat the row before in all layers, or are 0 to K-1, which no
            router chose.
        merge_turns: of sequences whose tokens are the beginning of a longer one, such as turns of a conversation, keep
            the longest alone, with the rows of the others where it has none. The dump is read twice.
        limits: False: read the files in this process, without limits of memory and processor time.

    Raises:
        InputError: one line that names the file and the place in it, if the dump is of no known format, is damaged, is
            not of the model, or takes more than the limits.
    """
    check_optional(1, num_experts=num_experts, num_layers=num_layers, top_k=top_k)
    check_whole(0, step=step)
    if format is not None:
        check_choice("format", format, FORMATS)
    if rows_at is not None:
        check_choice("rows_at", rows_at, ROWS_AT)
    check_pattern(step_from)
    files = named_files(source, "*")
    given = ImportOptions(
        num_experts=num_experts, num_layers=num_layers, top_k=top_k, step=step, step_from=step_from, domain=domain,
        optional=found_files(source, files), rows_at=rows_at, drop_repeats=drop_repeats,
        merge_turns=merge_turns,
    )  # fmt: skip
    options = with_model(given, model or named_model(files, given), overrides)
    read = bounded_import if limits else import_own_files
    summary = Summary()
    trace = RoutingTrace.concatenate(list(read(files, format, options, summary)))
    for note in summary.notes:
        log.info("%s", note)
    return replace(trace, numbering=numbering_of(model), notes=summary.notes)


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
