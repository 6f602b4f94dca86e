"""`TppoBenchmark`: sizes of `trimtab bench t-ppo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.rl.config import TrainConfig, ValueModelName

ALGORITHMS = ("ppo", "grpo", "t-ppo")
MINI_BATCHES = 2


@dataclass(frozen=True)
class TppoBenchmark:
    """Sizes of the benchmark.

    Attributes:
        seeds: seeds 0 to seeds - 1, of model, problems and sampling. All algorithms start from the same warm start.
        trained_tokens: that the policy is trained on in each run.
        places: responses that are generated together, over all ranks.
        samples: responses of GRPO to a problem; PPO and T-PPO have one.
        window: most new tokens of a response in a step of T-PPO.
        value_model: of PPO and T-PPO.
        max_new_tokens: of a response.
        evaluations: measurements of accuracy after the first, at equal distances in trained tokens.
        held_out: problems that accuracy is measured on.
        warm_start_steps, warm_start_batch: of the supervised phase.
        learning_rate: of RL steps.
        expert_width: of the small model.
        most_steps: of a run; one that needs more is given up.
        json: file for the figures; None for none; `STDOUT` prints no tables.
        picture: file to draw the curves to; None for none.
    """

    seeds: int = 5
    trained_tokens: int = 40_000
    places: int = 64
    samples: int = 8
    window: int = 32
    value_model: ValueModelName = "head"
    max_new_tokens: int = 100
    evaluations: int = 8
    held_out: int = 128
    warm_start_steps: int = 150
    warm_start_batch: int = 64
    learning_rate: float = 5e-5
    expert_width: int = 256
    most_steps: int = 1000
    json: Path | None = None
    picture: Path | None = None

    def config(self, algorithm: str, seed: int, out: Path) -> TrainConfig:
        """Settings of a run. T-PPO has one optimizer step in an RL step, which has fewer tokens; others have two."""
        samples = self.samples if algorithm == "grpo" else 1
        return TrainConfig(
            out=out,
            task="counting",
            algorithm=algorithm,
            expert_width=self.expert_width,
            problems=self.places // samples,
            samples=samples,
            mini_batches=1 if algorithm == "t-ppo" else MINI_BATCHES,
            max_new_tokens=self.max_new_tokens,
            window=self.window,
            value_model=self.value_model,
            warm_start_steps=self.warm_start_steps,
            warm_start_batch=self.warm_start_batch,
            held_out=self.held_out,
            learning_rate=self.learning_rate,
            seed=seed,
        )
