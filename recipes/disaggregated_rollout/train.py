"""`python -m recipes.disaggregated_rollout.train`: the RL loop of `recipes.rl` with a disaggregated rollout.

Attention ranks generate. The responses then move to the ranks that sample them in a colocated rollout, so that training
is the same. Homes are planned when the rollout has ended, not while it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from recipes.disaggregated_rollout.rollout import DisaggregatedRollout, Generated
from recipes.rl.checkpoint import Checkpoint
from recipes.rl.config import TrainConfig, about
from recipes.rl.responses import Prompts, Response, count_solved, encode, gather, rewarded
from recipes.rl.task import Problem
from recipes.rl.train import PreparedStep, Trainer, command
from trimtab.array_type import Array
from trimtab.cli.options import positive
from trimtab.errors import InputError
from trimtab.integrations.transformers import num_experts
from trimtab.trace import RoutingTrace, read_trace
from trimtab.trace.counting import count_experts


@dataclass(frozen=True)
class DisaggregatedConfig(TrainConfig):
    """Settings of a run. Slots of the training are also those of an expert rank for copies of hot experts."""

    attention_ranks: int = field(default=1, metadata=about("ranks that generate", positive))
    expert_ranks: int = field(default=1, metadata=about("the other ranks, which hold the experts", positive))
    micro_batches: int = field(default=2, metadata=about("parts of a rank's batch that take turns", positive))

    def check(self, ranks: int, model_config: Any) -> None:
        """Raise InputError if settings don't fit each other."""
        super().check(ranks, model_config)
        both = f"{self.attention_ranks} attention ranks and {self.expert_ranks} expert ranks"
        if self.algorithm == "t-ppo":
            raise InputError("the rollout generates whole responses; --algorithm should be grpo or ppo")
        if (total := self.attention_ranks + self.expert_ranks) != ranks:
            raise InputError(f"{both} are {total}; together they should be the {ranks} ranks")
        if num_experts(model_config) % self.expert_ranks:
            raise InputError(f"{self.expert_ranks} expert ranks don't divide {num_experts(model_config)} experts")


class DisaggregatedTrainer(Trainer):
    """One rank of a training run whose rollout has attention and experts on different ranks."""

    config: DisaggregatedConfig

    @cached_property
    def remote(self) -> DisaggregatedRollout:
        """The rollout model, of which this rank keeps a part. Made when it is first used."""
        names = "attention_ranks", "expert_ranks", "micro_batches"
        sizes = {name: getattr(self.config, name) for name in names}
        return DisaggregatedRollout(self.rollout_model, **sizes, copies=self.config.slots)

    def _restore(self, checkpoint: Checkpoint) -> None:
        # Experts are placed by the last step that trained something.
        traces = map(read_trace, sorted(self.config.out.glob("routing/*.parquet"))[: checkpoint.step])
        for trace in traces:
            self.place(trace if self.rank == 0 else self.routing_of([], 0))
        super()._restore(checkpoint)

    def sync_rollout(self) -> None:
        """Copy the trained weights to the ranks of the rollout. Collective."""
        self.remote.load(self.session.whole_state_dict(self.model))

    def count_correct(self, problems: Sequence[Problem]) -> int:
        """Number of this rank's problems that the model solves by greedy decoding; 0 on expert ranks. Collective."""
        mine = [problems[index] for index in self._share(range(len(problems)))]
        generated, prompts = self._generate(mine, 1)
        if generated is None or prompts is None:
            return 0
        return count_solved(self.tokenizer, mine, generated.tokens[:, prompts["input_ids"].shape[1] :])

    def sample(
        self, problems: Sequence[Problem], step: int, count: Callable[[RoutingTrace], None] | None
    ) -> list[Response]:
        """The responses that this rank has in a colocated rollout, in that order. Collective."""
        # In the order of the ranks that train them, so that attention ranks have neighbours of it.
        order = sorted(range(len(problems)), key=lambda index: (index % self.num_ranks, index))
        mine, samples = self._share(order), self.config.samples
        chosen = [problems[index] for index in mine]
        generated, prompts = self._generate(chosen, samples, self.draws(step, mine))
        responses: list[Response] = []
        if generated is not None and prompts is not None:
            responses = rewarded(self.tokenizer, chosen, prompts["attention_mask"].cpu(), *generated)
        homes = (np.repeat(np.array(mine, np.int64), samples) % self.num_ranks).tolist()
        sent = [each for part in gather(list(zip(homes, responses, strict=True))) for each in part]
        arrived = [response for home, response in sent if home == self.rank]
        if count is not None:
            count(self.routing_of(arrived, step))
        return arrived

    def after_update(self, prepared: PreparedStep) -> dict[str, float]:
        """Place experts by the routing of the step, before the rollout gets weights. Returns metrics. Collective."""
        load_XL = self.remote.load_XL
        mean_L = load_XL.mean(axis=0)
        vio_L = (load_XL.max(axis=0) - mean_L) / np.maximum(mean_L, 1)
        replaced = self.place(prepared.trace)
        return {"rollout/expert_max_vio": float(vio_L.mean()), "rollout/replaced_experts": float(replaced)}

    def place(self, trace: RoutingTrace) -> int:
        """Place experts by the routing of all ranks' responses. Returns the number of those that moved. Collective."""
        counts_LE = sum(gather(count_experts(trace, np.zeros(trace.num_sequences), 1, np.int64)[0]))
        # A step may train no responses.
        return self.remote.place(counts_LE) if counts_LE.any() else 0

    def _share(self, order: Sequence[int]) -> list[int]:
        """This rank's part of problems in this order; none on expert ranks."""
        parts = np.array_split(order, self.remote.num_attention)
        return parts[self.rank].tolist() if self.remote.is_attention else []

    def _generate(
        self, problems: Sequence[Problem], samples: int, uniforms: Array | None = None
    ) -> tuple[Generated | None, Prompts | None]:
        """Responses, and their prompts; None without problems."""
        repeated = [problem for problem in problems for _ in range(samples)]
        prompts = encode(self.tokenizer, repeated, self.device) if repeated else None
        return self.remote.generate(self.tokenizer, prompts, self.config.max_new_tokens, uniforms), prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    about = "The RL loop of recipes.rl, whose rollout has attention and experts on different ranks."
    examples = "-o out/rollout --micro-batches 3", "-o out/rollout --ranks 4 --attention-ranks 2 --expert-ranks 2"
    name = "recipes.disaggregated_rollout.train"
    return command(name, about, examples, DisaggregatedTrainer, DisaggregatedConfig, arguments)


if __name__ == "__main__":
    # The module as other processes import it.
    sys.exit(import_module("recipes.disaggregated_rollout.train").main())
