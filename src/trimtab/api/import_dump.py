"""`trimtab.import_dump`: routing that a framework recorded, as a trace."""

from __future__ import annotations

from dataclasses import replace

from trimtab.api.arguments import ModelSource, Overrides, check_choice, check_optional, check_whole
from trimtab.cluster import ModelSpec, load_model
from trimtab.errors import InputError
from trimtab.trace import RoutingTrace
from trimtab.trace.formats.bounded_import import bounded_import
from trimtab.trace.formats.importing import FORMATS
from trimtab.trace.formats.normalise import Summary
from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.store import Source, named_files


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
    domain: str = "",
) -> RoutingTrace:
    """Returns the routing that an RL or serving framework recorded, as `trimtab trace import` writes it.

    A child process with limits of memory and time reads the files, which may come from a stranger.

    Args:
        source: a path (file, folder or pattern), or a list of paths: one dump, in this order.
        format: of the dump, see `trimtab trace import --help`; by default detected.
        model: a `ModelSpec`, a preset's name or hub id, a config.json or a checkpoint: experts, layers and top-k, and
            which layers have experts. By default they are given one by one, or in the dump.
        overrides: keys of the model's config with other values.
        num_experts, num_layers, top_k: without a model; `num_layers` are decoder layers, with and without experts.
        step: RL step of sequences without one.
        domain: label of sequences without one.

    Raises:
        InputError: one line that names the file and the place in it, if the dump is of no known format, is damaged, is
            not of the model, or takes more than the limits.
    """
    check_optional(1, num_experts=num_experts, num_layers=num_layers, top_k=top_k)
    check_whole(0, step=step)
    if format is not None:
        check_choice("format", format, FORMATS)
    given = ImportOptions(num_experts=num_experts, num_layers=num_layers, top_k=top_k, step=step, domain=domain)
    options = with_model(given, model, overrides)
    parts = list(bounded_import(named_files(source, "*"), format, options, Summary()))
    return RoutingTrace.concatenate(parts)


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
    model = source if isinstance(source, ModelSpec) else load_model(source, overrides)
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
