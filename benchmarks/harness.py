"""What all benchmarks share: command line, figures as JSON, and ratios of runs with and without balancing.

The runs alternate by `trimtab.calibration.alternating_rounds`, which also has the bootstrap of one list of values.
`benchmarks.tables` prints the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console

from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import BOOTSTRAP_SAMPLES
from trimtab.cli.main import run
from trimtab.cli.options import add_options, given
from trimtab.cli.parser import Parser
from trimtab.files import STDOUT, write_json

Figures = dict[str, Any]
Printer = Callable[[Figures, Console], None]


def main(name: str) -> NoReturn:
    """Run `python -m NAME`, and end with its exit status. For modules that are run: `main("benchmarks.live")`."""
    sys.exit(run_command(name, sys.argv[1:]))


def run_command(name: str, words: Sequence[str]) -> int:
    """Run the command of a module with options. Returns the exit status; bad input is one line and status 2.

    Functions are those of the imported module, not of `__main__`, so that other processes can import them.
    """

    def parse() -> argparse.Namespace:
        options = make_parser(name).parse_args(words)
        options.arguments = words
        return options

    return run(command_of(name), parse)


def command_of(name: str) -> str:
    """The command that runs a module."""
    return f"python -m {name.removesuffix('.__main__')}"


def make_parser(name: str) -> Parser:
    """The parser of a module's command, described by the first two paragraphs of the module's docstring.

    The module has `add_to(parser)`, which adds its options; `--json` is added here. It has `run(options)`; or
    `run_benchmark`, whose arguments are the options and which returns the figures, and `print_figures`. `EXAMPLES` are
    the options in the examples of the help.
    """
    module: Any = import_module(name)
    command = command_of(name)
    about = " ".join(module.__doc__.split("\n\n")[:2]).removeprefix(f"`{command}`: ")
    examples = getattr(module, "EXAMPLES", (f"--json out/bench-{name.rpartition('.')[2]}.json",))
    parser = Parser(
        prog=command,
        description=about[0].upper() + about[1:],
        examples=[f"{command} {words}" for words in examples],
    )
    module.add_to(parser)
    add_options(parser, "--json")

    def measure(options: argparse.Namespace) -> None:
        figures = module.run_benchmark(**given(options, module.run_benchmark))
        show(figures, module.print_figures, options.json)

    parser.set_defaults(run=getattr(module, "run", measure))
    return parser


def show(figures: Figures, print_figures: Printer, json: Path | None) -> None:
    """Write figures to a file, if one is named, and print their tables, unless the file is standard output."""
    if json is not None:
        write_json(json, figures)
    print_figures(figures, Console(highlight=False, quiet=json == STDOUT))


def settings_of(settings: Any, *but: str) -> dict[str, Any]:
    """The fields of a dataclass of settings for figures, without `json` and those in `but`."""
    return {name: value for name, value in asdict(settings).items() if name not in ("json", *but)}


def summarise_pairs(step_s: Mapping[str, Sequence[float]], plans: Sequence[Mapping[str, Any]]) -> Figures:
    """Medians and ratios of step times with and without balancing, on even and on skewed routing.

    Args:
        step_s: seconds of `plain_balanced`, `planned_balanced`, `plain_skewed` and `planned_skewed`, one per round.
            Skewed rounds have the seeds 0, 1, ... in turn.
        plans: figures of the plan on each seed's routing.

    Returns:
        `variants`, times of each variant; `seeds`, figures of each seed; the ratios. `overhead_when_balanced` is the
        median over rounds. `gain_captured` of a seed is the median time that the plan saves, divided by the median
        time that skew costs; of all seeds, the sum of the first divided by the sum of the second. Intervals
        (`_interval`) are 95% bootstrap over rounds.
    """
    times = {name: np.array(seconds) for name, seconds in step_s.items()}
    rounds = len(times["plain_balanced"])
    of_seeds = [np.arange(seed, rounds, len(plans)) for seed in range(len(plans))]
    rng = np.random.default_rng(0)
    samples_SBN = [rng.choice(chosen, (BOOTSTRAP_SAMPLES, len(chosen))) for chosen in of_seeds]
    seconds_2SB = np.stack([_saved_and_lost(times, drawn_BN) for drawn_BN in samples_SBN], axis=1)
    seconds_2S = np.stack([_saved_and_lost(times, chosen) for chosen in of_seeds], axis=1)
    by_seed = zip(plans, seconds_2S.T.tolist(), of_seeds, strict=True)
    overhead_B = _overhead(times, rng.integers(rounds, size=(BOOTSTRAP_SAMPLES, rounds)))
    return {
        "variants": {name: {"median_s": statistics.median(s), "step_s": list(s)} for name, s in step_s.items()},
        "overhead_when_balanced": float(_overhead(times, np.arange(rounds))),
        "overhead_when_balanced_interval": percentiles(overhead_B),
        "gain_captured": float(np.divide(*seconds_2S.sum(axis=1))),
        "gain_captured_interval": percentiles(np.divide(*seconds_2SB.sum(axis=1))),
        "seeds": [
            {
                "seed": seed,
                **plan,
                "gain_captured": saved / lost,
                "median_s": {name: float(np.median(seconds[chosen])) for name, seconds in times.items()},
            }
            for seed, (plan, (saved, lost), chosen) in enumerate(by_seed)
        ],
    }


def _overhead(times: Mapping[str, Array], rounds: Array) -> Array:
    ratios = times["planned_balanced"][rounds] / times["plain_balanced"][rounds]
    return np.asarray(np.median(ratios, axis=-1) - 1)


def _saved_and_lost(times: Mapping[str, Array], rounds: Array) -> Array:
    """Median seconds that the plan saves and that skew costs, `[2, ...]`."""
    skewed = times["plain_skewed"][rounds]
    differences = skewed - times["planned_skewed"][rounds], skewed - times["plain_balanced"][rounds]
    return np.median(differences, axis=-1)


def percentiles(samples: Array) -> list[float]:
    """The 95% interval of bootstrap samples, low and high."""
    return [float(bound) for bound in np.percentile(samples, [2.5, 97.5])]
