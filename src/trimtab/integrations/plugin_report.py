"""What plugins print and log: the first line of a trainer's log, and figures of a step for the framework's logger."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trimtab import __version__
from trimtab.integrations.megatron.option_tables import never_run, options_of
from trimtab.integrations.options import PluginOptions

if TYPE_CHECKING:
    from trimtab.integrations.megatron import MegatronSession

_PLANNED = {
    "moe/replicas": "moe/planned_replicas",
    "moe/max_vio_after": "moe/planned_max_vio",
}
"""Figures of what was planned, in place of the report's expectations."""
_LIVE = {
    "moe/replicas": "live/replicas",
    "moe/max_vio_before": "live/max_vio_before",
    "moe/max_vio_after": "live/max_vio_after",
}


def first_line(framework: str, options: PluginOptions, config: Any, notes: Sequence[str] = ()) -> str:
    """Versions, mode, experts, and what of a run has never run with Trimtab.

    Args:
        framework: its package, for example `slime`.
        config: the model's TransformerConfig, or arguments of the same names.
        notes: further remarks of the plugin.
    """
    packages = ", ".join(f"{name} {_version(name)}" for name in (framework, "megatron-core", "torch"))
    experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)
    ranks = getattr(config, "expert_model_parallel_size", 1)
    remarks = ["this plugin has never run on a GPU", *never_run(options_of(config)).values(), *notes]
    return (
        f"Trimtab {__version__} in {packages}: mode={options.mode} slots_per_rank={options.slots_per_rank}, "
        f"{experts} experts on {ranks} ranks; {'; '.join(remarks)}"
    )


def print_on_first_rank(line: str) -> None:
    """Print a line on rank 0; frameworks show only warnings of other loggers than their own."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def step_figures(session: MegatronSession) -> dict[str, float]:
    """Figures of the passes of a model since the last call, for the framework's logger; empty if none was balanced.

    Returns:
        `moe/replicas` in all layers and micro-steps, `moe/max_vio_before` and `moe/max_vio_after`,
        `moe/predicted_gain`, `moe/mixed_instances` (layers of micro-steps with unknown routes),
        `moe/unplanned_micro_steps`, `moe/late_micro_steps` (without replicas, since these were not planned yet), and
        `memory/pool_bytes`, of slots and arriving gradients. Those of a plan are of the last pass. In mode `live` those
        that it has.
    """
    metrics, report = session.take_metrics(), session.report
    if report is None:
        return {name: metrics[source] for name, source in _LIVE.items() if metrics.get("live/calls")}
    counted = {name: metrics.get(f"moe/{name}", 0) for name in ("unplanned_micro_steps", "late_micro_steps")}
    return {
        "moe/replicas": report.replicas,
        "moe/max_vio_before": report.max_vio_before,
        "moe/max_vio_after": report.max_vio_after,
        "moe/predicted_gain": report.predicted_gain,
        "moe/mixed_instances": report.mixed_instances,
        **{f"moe/{name}": value for name, value in counted.items()},
        "memory/pool_bytes": report.memory.pool_bytes,
        **{name: float(metrics[source]) for name, source in _PLANNED.items() if source in metrics},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"
