"""`TrainConfig`: settings of a training run, each an option of the command, and those of a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trimtab.cli.options import SHARED, add_options, positive, whole
from trimtab.cli.parser import Parser
from trimtab.errors import InputError

MODES = ("plan", "live", "static", "shadow", "off")
VALUE_MODELS = ("head", "trunk")
LIVE_POLICIES = ("quota", "feplb", "off")
# Settings that a resumed run may change: its length and how its work is distributed. Others would change its results.
MAY_CHANGE = {
    "out", "mode", "policy", "slots", "steps", "token_budget", "save_every", "compare_pairs",
    "attention_ranks", "expert_ranks", "micro_batches",
}  # fmt: skip


def absolute(path: str) -> Path:
    """The path from the root, so that a run can be resumed in another folder."""
    return Path(path).absolute()


def about(help: str, kind: Any = str, **settings: Any) -> dict[str, Any]:
    """The option of a setting, as for `add_options`."""
    return {"help": help, "type": kind, **settings}


def choice(help: str, *choices: str) -> dict[str, Any]:
    """The option of a setting that is one of these names."""
    return {"help": help, "choices": choices, "type": None}


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run."""

    out: Path
    model: Path | None = field(
        default=None, metadata=about("local Hugging Face checkpoint", absolute, metavar="FOLDER", unset="a small model")
    )
    task: str = field(default="sums", metadata=choice("counting down has long responses", "sums", "counting"))
    algorithm: str = field(default="grpo", metadata=choice("t-ppo generates in parts", "grpo", "ppo", "t-ppo"))
    mode: Any = field(default="plan", metadata=choice("how experts are balanced; live follows the router", *MODES))
    policy: Any = field(
        default="quota", metadata=choice("how mode live chooses replicas", *LIVE_POLICIES) | {"type": None}
    )
    expert_width: int = field(default=768, metadata=about("inner width of the small model's experts", positive))
    slots: int = field(default=2, metadata=about(SHARED["--slots"][1], whole))
    steps: int = field(default=20, metadata=about("RL steps", whole))
    problems: int = field(default=192, metadata=about("problems of a step, over all ranks", positive))
    samples: int = field(default=8, metadata=about("responses to each problem", positive))
    mini_batches: int = field(default=2, metadata=about("optimizer steps in an RL step", positive))
    token_budget: int = field(default=8192, metadata=about("most tokens of a rank in a micro-step", positive))
    max_new_tokens: int = field(default=20, metadata=about("longest response", positive, unset="20, or 100 to count"))
    value_model: str = field(default="head", metadata=choice("of ppo and t-ppo", *VALUE_MODELS))
    window: int = field(default=8, metadata=about("t-ppo: most new tokens of a response in a step", positive))
    learning_rate: float = field(default=2e-4, metadata=about("learning rate of RL steps", float))
    warm_start_steps: int = field(default=250, metadata=about("supervised steps before RL", whole))
    warm_start_batch: int = field(default=128, metadata=about("sequences of a supervised step", positive))
    held_out: int = field(default=512, metadata=about("problems that accuracy is measured on", positive))
    measure_every: int = field(default=0, metadata=about("RL steps between measurements; 0 for one at the end", whole))
    save_every: int = field(default=10, metadata=about("RL steps between checkpoints", positive))
    compare_pairs: int = field(default=20, metadata=about("timed pairs of a balanced and a static step", whole))
    seed: int = field(default=0, metadata=about("random seed", whole))

    def to_json(self, ranks: int) -> str:
        """Content of `out/settings.json`, which `resumed` reads."""
        return json.dumps(asdict(self) | {"ranks": ranks}, indent=2, default=str) + "\n"

    def check(self, ranks: int, model_config: Any) -> None:
        """Raise InputError if settings don't fit each other."""
        if self.value_model == "trunk" and self.algorithm == "grpo":
            raise InputError("--value-model trunk: grpo has no value model; use --algorithm ppo or t-ppo")
        if self.problems < ranks:
            raise InputError(f"--problems is {self.problems}; each of the {ranks} ranks needs at least one")


def add_to(parser: Parser, of: type[TrainConfig]) -> None:
    """Add the options of a run with settings of this type."""
    add_options(
        parser, "--output", type=Path, dest="out", required=True, metavar="FOLDER",
        help="folder to write; new or empty, except with --resume",
    )  # fmt: skip
    about = "continue from the last checkpoint in the folder with the settings of that run; if it is empty, start anew"
    add_options(parser, "--resume", action="store_true", help=about)
    add_options(parser, "--ranks", unset="2")
    for each in fields(of):
        if each.metadata:
            add_options(parser, f"--{each.name.replace('_', '-')}", of=of, **each.metadata)


def resumed(of: type[TrainConfig], out: Path, asked: Mapping[str, Any]) -> tuple[TrainConfig, int]:
    """Settings of the run in `out`, replaced by those asked for now, and its number of ranks.

    Raises:
        InputError: if there is no run in `out`, or a setting must not change.
    """
    try:
        settings = json.loads((out / "settings.json").read_text())
        ranks = settings.pop("ranks")
        config = of(**settings | {"out": out, "model": settings["model"] and Path(settings["model"])})
    except FileNotFoundError:
        raise InputError(f"--output {out}: no run to resume there (no settings.json)") from None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{out}/settings.json: expected the settings of a run of this version") from None
    for name in sorted(asked.keys() - MAY_CHANGE):
        if asked[name] != (before := getattr(config, name)):
            option = f"--{name.replace('_', '-')}"
            wrong = f"{option} is {asked[name]}; the run in {out} has {before}, and that can't change"
            raise InputError(f"{wrong}: leave {option} out, or begin a new run")
    return replace(config, **asked), ranks
