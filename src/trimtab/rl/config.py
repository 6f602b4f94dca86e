"""`TrainConfig`: settings of a training run, and the settings of a run that is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.errors import InputError

if TYPE_CHECKING:
    from trimtab.runtime.live.balancer import LivePolicy
    from trimtab.runtime.session_settings import Mode

# Settings that a resumed run may change: its length and how its work is distributed. Others would change its results.
MAY_CHANGE = frozenset(
    ("out", "mode", "policy", "slots", "steps", "token_budget", "gradient_checkpointing", "save_every", "compare_pairs",
     "rollout", "attention_ranks", "expert_ranks", "micro_batches")
)  # fmt: skip

ALGORITHMS = ("grpo", "ppo", "t-ppo")
ValueModelName = Literal["head", "trunk"]
RolloutName = Literal["colocated", "disaggregated"]
PrefixRouting = Literal["recorded", "rebuilt", "live"]
"""The experts of tokens of earlier windows in training. `recorded`: those that their own window recorded; `rebuilt`:
those that they used when this step filled the cache again; `live`: those that the router chooses in training."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `trimtab train`.

    Attributes:
        out: folder of all files that the run writes.
        model: a local Hugging Face checkpoint directory; None for a small random model.
        task: what is trained: `sums` of a few digits, or `counting` down from a number, whose responses are long
            and uneven.
        algorithm: that RL steps use, one of `ALGORITHMS`.
        expert_width: inner width of the small model's experts; it has no effect with `model`.
        mode: how recompute and update are balanced, see `Session`. In `live` they follow the router, not the rollout's
            routing, and the warm start is balanced too.
        policy: how replicas are chosen in mode `live`, see `Session`.
        slots: slots per rank and layer; also those of an expert rank for copies of hot experts in the rollout.
        rollout: `colocated`, with the whole model on every rank, or `disaggregated`, see `trimtab.rollout`.
        attention_ranks, expert_ranks: of a disaggregated rollout, together all ranks.
        micro_batches: parts of an attention rank's batch that take turns.
        steps: RL steps.
        problems: problems of an RL step, over all ranks.
        samples: responses to each problem.
        mini_batches: optimizer steps in an RL step.
        token_budget: most tokens of a rank in a micro-step.
        max_new_tokens: most tokens of a response.
        value_model: of PPO and T-PPO: a dense `head` on the policy's hidden states, or a `trunk`, a decoder with
            experts of its own. In the modes `plan` and `live` these have replicas, chosen from live routing.
        window: most new tokens of a response in a step of T-PPO; other algorithms generate whole responses.
        prefix_routing: how T-PPO's training routes tokens of earlier windows; it has no effect in mode `live`.
        learning_rate: of RL steps; warmed up over the first steps.
        warm_start_steps: supervised steps before RL.
        warm_start_batch: sequences of a supervised step, over all ranks.
        warm_start_learning_rate: peak learning rate of the supervised steps.
        max_norm: gradient norm to clip to.
        gradient_checkpointing: recompute activations in backward.
        held_out: number of problems that accuracy is measured on.
        save_every: RL steps between checkpoints; the last step is always saved.
        compare_pairs: steps after the last one that are also trained in mode static, to compare times, if the mode is
            `plan` or `rehome`; 0 for none.
        seed: of model, problems and sampling.
    """

    out: Path
    model: Path | None = None
    task: Literal["sums", "counting"] = "sums"
    algorithm: str = "grpo"
    expert_width: int = 768
    mode: Mode = "plan"
    policy: LivePolicy = "quota"
    slots: int = 2
    rollout: RolloutName = "colocated"
    attention_ranks: int = 1
    expert_ranks: int = 1
    micro_batches: int = 2
    steps: int = 20
    problems: int = 192
    samples: int = 8
    mini_batches: int = 2
    token_budget: int = 8192
    max_new_tokens: int = 20
    value_model: ValueModelName = "head"
    window: int = 8
    prefix_routing: PrefixRouting = "recorded"
    learning_rate: float = 2e-4
    warm_start_steps: int = 250
    warm_start_batch: int = 128
    warm_start_learning_rate: float = 2e-3
    max_norm: float = 1.0
    gradient_checkpointing: bool = False
    held_out: int = 512
    save_every: int = 10
    compare_pairs: int = 20
    seed: int = 0

    def to_json(self, ranks: int) -> str:
        """Content of `out/settings.json`, which `resumed` reads."""
        settings = asdict(self) | {"model": self.model and str(self.model.absolute()), "ranks": ranks}
        del settings["out"]
        return json.dumps(settings, indent=2) + "\n"


def resumed(out: Path, given: dict[str, Any]) -> tuple[TrainConfig, int]:
    """Settings of the run in `out`, replaced by those given now, and its number of ranks.

    Raises:
        InputError: if there is no run in `out`, or a given setting must not change.
    """
    path = out / "settings.json"
    try:
        settings = json.loads(path.read_text())
        ranks = int(settings.pop("ranks"))
        settings["model"] = settings["model"] and Path(settings["model"])
        config = TrainConfig(**settings | {"out": out})
    except FileNotFoundError:
        raise InputError(f"--output {out}: no run to resume there (no settings.json)") from None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: expected the settings of a run, as this version writes them") from None
    for field in fields(TrainConfig):
        before, now = getattr(config, field.name), given.get(field.name)
        if now is not None and field.name == "model":
            now = now.absolute()
        if now is not None and now != before and field.name not in MAY_CHANGE:
            option = f"--{field.name.replace('_', '-')}"
            raise InputError(
                f"{option} is {now}; the run in {out} has {before}, and that can't change: leave {option} out, "
                "or begin a new run"
            )
    return TrainConfig(**settings | {"out": out} | given), ranks
