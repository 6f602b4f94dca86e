"""Training runs of `python -m benchmarks.t_ppo`: accuracy over decode steps, trained tokens and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from trimtab.errors import InputError
from trimtab.integrations.transformers import num_experts
from trimtab.rl.collectives import reduce
from trimtab.rl.config import PrefixRouting, TrainConfig, ValueModelName
from trimtab.rl.sequences import Sequence as Response
from trimtab.rl.step_metrics import StepClock, rollout_metrics
from trimtab.rl.trainer import Trainer
from trimtab.trace.routing import no_route

ALGORITHMS = ("ppo", "grpo", "t-ppo")
MINI_BATCHES = 2
# What is added up over the steps of a run, by the name of the metric.
COUNTED = {
    "decode_steps": "rollout/decode_steps",
    "sampled_tokens": "rollout/tokens",
    "prefix_tokens": "rollout/prefix_tokens",
    "computed_tokens": "tokens/computed",
    "trained_tokens": "tokens/trained",
}


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
        json: file for the figures; None for none.
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


def runs_of_seed(settings: TppoBenchmark, seed: int, out: Path, advance: Callable[[str], None]) -> list[dict[str, Any]]:
    """One run of each algorithm from the same warm start; which is first depends on the seed. Collective.

    Args:
        settings: of the benchmark.
        seed: of all runs.
        out: a folder, to which nothing is written.
        advance: called after every evaluation with a note.
    """
    torch.set_num_threads(1)
    first = Trainer(settings.config("ppo", seed, out))
    first.warm_start()
    weights = [parameter.detach().clone() for parameter in first.model.parameters()]
    first.close()
    names = [*ALGORITHMS[seed % len(ALGORITHMS) :], *ALGORITHMS[: seed % len(ALGORITHMS)]]
    if seed == 0:
        # Kernels are compiled in a run that does not count.
        for name in names:
            AlgorithmRun(settings, name, seed, out, weights).close_after(steps=1)
    runs = [AlgorithmRun(settings, name, seed, out, weights).figures(advance) for name in names]
    return sorted(runs, key=lambda run: ALGORITHMS.index(run["algorithm"]))


class AlgorithmRun:
    """A run of one algorithm.

    Args:
        settings: of the benchmark.
        algorithm: its name.
        seed: of the run.
        out: a folder, to which nothing is written.
        weights: of this rank's parameters after the warm start.
    """

    def __init__(
        self, settings: TppoBenchmark, algorithm: str, seed: int, out: Path, weights: Sequence[torch.Tensor]
    ) -> None:
        self._settings, self._algorithm, self._seed = settings, algorithm, seed
        self._trainer = Trainer(settings.config(algorithm, seed, out))
        for parameter, weight in zip(self._trainer.model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        self._trainer.weights_are_ready()
        self._counted = dict.fromkeys(COUNTED, 0)
        self._wall_s = 0.0
        # By kind: sums of differences, and tokens.
        self._differences: dict[str, list[float]] = {}

    def figures(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Train until enough tokens are trained, and close the session. Collective.

        Returns:
            `algorithm`, `seed`; `points`, one for each evaluation: what was counted until then, `wall_s` without
            evaluations, and `accuracy`; `rollout_logprob_diff` by kind of prefix routing, for T-PPO.
        """
        points = [self._point(advance)]
        step = 0
        for number in range(1, self._settings.evaluations + 1):
            enough = self._settings.trained_tokens * number / self._settings.evaluations
            is_first = True
            while self._counted["trained_tokens"] < enough:
                if step == self._settings.most_steps:
                    raise InputError(
                        f"{self._algorithm} trained {self._counted['trained_tokens']:,} tokens in {step} steps, seed "
                        f"{self._seed}; --trained-tokens {self._settings.trained_tokens:,} is out of reach. Responses "
                        "that are all right or all wrong train nothing: change --warm-start-steps or --trained-tokens"
                    )
                self._step(step, compare=is_first and step > 0)
                step, is_first = step + 1, False
            points.append(self._point(advance))
        self._trainer.close()
        return {
            "algorithm": self._algorithm,
            "seed": self._seed,
            "points": points,
            "rollout_logprob_diff": {
                name: total / tokens for name, (total, tokens) in self._differences.items() if tokens
            },
        }

    def close_after(self, steps: int) -> None:
        """Train some steps and close the session. Collective."""
        for step in range(steps):
            self._step(step, compare=False)
        self._trainer.close()

    def _step(self, step: int, *, compare: bool) -> None:
        trainer = self._trainer
        dist.barrier()
        start = time.perf_counter()
        responses = trainer.rollout(step)
        metrics = rollout_metrics(responses, trainer.device)
        trained = trainer.algorithm.trained(responses)
        paused = time.perf_counter()
        if compare and trainer.algorithm.windows is not None:
            self._compare_prefixes(trained, step)
        resumed = time.perf_counter()
        metrics |= trainer.train(trained, step, StepClock())[1]
        dist.barrier()
        self._wall_s += time.perf_counter() - resumed + paused - start
        for name, metric in COUNTED.items():
            self._counted[name] += int(metrics[metric])

    def _compare_prefixes(self, responses: Sequence[Response], step: int) -> None:
        """Recompute responses that have earlier windows with each kind of prefix routing."""
        trainer = self._trainer
        old = [response for response in responses if response.rebuilt_ids is not None]
        for routing in get_args(PrefixRouting):
            unknown = no_route(num_experts(trainer.model_config))
            prepared = trainer.prepare([each.with_prefix_routing(routing, unknown) for each in old], step)
            assert prepared.planned is not None
            trainer.session.apply_plan(prepared.planned, prepared.trace)
            found = (reduce(each, trainer.device) for each in prepared.rollout_differences(trainer.recompute(prepared)))
            before = self._differences.get(routing, (0.0, 0.0))
            self._differences[routing] = [old + new for old, new in zip(before, found, strict=True)]

    def _point(self, advance: Callable[[str], None]) -> dict[str, Any]:
        self._trainer.measure_accuracy("now")
        accuracy = self._trainer.held_out_accuracy["now"]
        advance(f"seed {self._seed}, {self._algorithm}: {accuracy:.0%}")
        return {**self._counted, "wall_s": self._wall_s, "accuracy": accuracy}
