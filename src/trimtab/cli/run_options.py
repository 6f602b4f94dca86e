"""Options of a run that `advise`, `analyze`, `plan` and `simulate` share, from one place."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from trimtab.api.arguments import DISPATCHERS
from trimtab.cli.options import add_model, add_options, add_settings, add_trace, positive
from trimtab.cluster.parallel_layout import GRANULARITIES

# What holds without --ranks and a size of micro-steps.
DEFAULT_RANKS = "16, or the largest power of two below that divides the experts"
DEFAULT_SIZE = "8192, or the longest sequence if that is more"


def add_run(
    parser: argparse.ArgumentParser,
    *,
    of: Callable[..., object],
    step: str = "the last of the trace",
    what_for: str = "",
    is_sweep: bool = False,
) -> None:
    """Add trace, settings file, cluster, model, ranks, and the size of the step.

    Args:
        of: the function of the command, as in `add_options`.
        step: what holds without `--step`.
        what_for: of options that matter for seconds alone, at the end of their help.
        is_sweep: whether ranks, micro-steps and dispatcher may have several values.
    """
    several: dict[str, Any] = {"nargs": "+"} if is_sweep else {}
    add_trace(parser)
    add_settings(parser)
    option = partial(add_options, parser, of=of)
    option("--cluster")
    add_model(parser, of=of, unset="the trace's, else a preset like the trace")
    option("--ranks", unset=DEFAULT_RANKS, **several)
    option("--ranks-per-node", unset="the cluster's")
    option("--groups", type=positive, help=f"expert-parallel groups{what_for}")
    size = partial(add_options, parser.add_mutually_exclusive_group(), of=of)
    size("--micro-steps", unset="as the token budget gives", **several)
    size("--token-budget", unset=DEFAULT_SIZE)
    option(
        "--dispatcher", choices=tuple(DISPATCHERS), unset="the cluster's", **several,
        help="what is sent to a node: every row, or a token once (DeepEP, HybridEP, MoRI)",
    )  # fmt: skip
    option(
        "--no-recompute", action="store_false", dest="recompute",
        help=f"update alone, with the rollout's log-probabilities{what_for}",
    )  # fmt: skip
    option("--step", unset=step)


def add_simulated_steps(parser: argparse.ArgumentParser, *, of: Callable[..., object], most: int) -> None:
    """Add which steps are simulated, how large they are if a part was recorded, and their layout beside the ranks.

    Args:
        of: the function of the command, as in `add_options`.
        most: steps that are simulated by default.
    """
    option = partial(add_options, parser, of=of)
    option("--steps", unset=f"all but the trace's first, at most {most}")
    scale = partial(add_options, parser.add_mutually_exclusive_group(), of=of)
    scale("--step-tokens", "--sampled", unset="the trace's")
    option("--tp", "--pp", "--cp")
    add_recompute_granularity(parser, of=of)


def add_recompute_granularity(parser: argparse.ArgumentParser, *, of: Callable[..., object]) -> None:
    """Add the option of activation checkpointing, `checkpointing` in Python."""
    add_options(
        parser, "--recompute-granularity", of=of, dest="checkpointing", choices=tuple(GRANULARITIES), unset="none",
        help="activations that are computed again for backward",
    )  # fmt: skip
