"""`DisaggregatedSampling`: rollouts of a training run whose attention and experts are on different ranks.

Attention ranks generate. The responses then move to the ranks that have them in a colocated rollout, so that training
is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.rl.config import TrainConfig
from trimtab.rl.rollout import MOST, count_solved, encode, rewarded
from trimtab.rl.sequences import Sequence, exchange_sequences
from trimtab.rl.task import Problem
from trimtab.rollout import DisaggregatedRollout, Generated
from trimtab.rollout.disaggregated_rollout import check_ranks
from trimtab.trace import RoutingTrace
from trimtab.trace.counting import count_experts


def response_draws(config: TrainConfig, step: int, problems: Iterable[int]) -> Array:
    """Draws `[B, max_new_tokens]` of the responses to these problems of a step, `config.samples` rows each."""
    sequences = [(problem, sample) for problem in problems for sample in range(config.samples)]
    draws = [np.random.default_rng((config.seed, step, *each)).random(config.max_new_tokens) for each in sequences]
    return np.array(draws).reshape(-1, config.max_new_tokens)


def sizes_of(config: TrainConfig) -> dict[str, int]:
    """Arguments of `trimtab.rollout.disaggregate` beside the model."""
    names = "attention_ranks", "expert_ranks", "micro_batches"
    return {name: getattr(config, name) for name in names} | {"copies": config.slots}


def check_disaggregated(config: TrainConfig, model_config: Any, ranks: int) -> None:
    """Raise InputError unless a run on so many ranks can have a disaggregated rollout."""
    if config.algorithm == "t-ppo":
        raise InputError("--rollout disaggregated generates whole responses; --algorithm should be grpo or ppo")
    check_ranks(model_config, ranks, **sizes_of(config))
    sequences = config.problems // config.attention_ranks * config.samples
    if config.micro_batches > sequences:
        raise InputError(
            f"--micro-batches is {config.micro_batches}, and an attention rank has {sequences} sequences; "
            "use fewer micro-batches or attention ranks, or more --problems or --samples"
        )


def make_disaggregated(config: TrainConfig, model: nn.Module, tokenizer: Any) -> DisaggregatedSampling | None:
    """The rollout of a run, if it is disaggregated. The model then keeps this rank's part. Collective."""
    if config.rollout == "colocated":
        return None
    check_disaggregated(config, model.config, dist.get_world_size())
    return DisaggregatedSampling(config, DisaggregatedRollout(model, **sizes_of(config)), tokenizer)


class DisaggregatedSampling:
    """Responses of a training run. All methods are collective.

    Attributes:
        rollout: the model on its ranks.
    """

    def __init__(self, config: TrainConfig, rollout: DisaggregatedRollout, tokenizer: Any) -> None:
        self.config, self.rollout, self.tokenizer = config, rollout, tokenizer
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

    def sample_groups(
        self,
        problems: Sequence_[Problem],
        step: int,
        routing_of: Callable[[list[Sequence], int], RoutingTrace],
        count: Callable[[RoutingTrace], None] | None,
    ) -> list[Sequence]:
        """The responses that this rank has in a colocated rollout, in that order.

        Args:
            problems: of all ranks.
            step: index of the RL step.
            routing_of: makes a trace of sequences of a step.
            count: called with the routing of responses that end first, as in a colocated rollout.
        """
        ranks, samples = dist.get_world_size(), self.config.samples
        # In the order of the ranks that train them, so that attention ranks have neighbours of it.
        mine = self._share(sorted(range(len(problems)), key=lambda index: (index % ranks, index)))
        chosen = [problems[index] for index in mine]
        generated, mask = self._generate(chosen, samples, response_draws(self.config, step, mine))
        sequences: list[Sequence] = []
        if generated is not None and mask is not None:
            starts = mask.shape[1] - mask.sum(dim=1).numpy()
            ends = mask.shape[1] + generated.lengths - 1
            routes = [ids[a:b] for ids, a, b in zip(generated.expert_ids, starts, ends, strict=True)]
            sequences = rewarded(self.tokenizer, chosen, samples, mask, generated.tokens, routes, generated.log_probs)
        homes = np.repeat(np.array(mine, np.int64) % ranks, samples)
        arrived = exchange_sequences(sequences, homes, self._device)
        if count is not None:
            count(routing_of(self._ended_first(arrived), step))
        return arrived

    def count_correct(self, problems: Sequence_[Problem]) -> int:
        """Number of this rank's problems that the model solves by greedy decoding; 0 on expert ranks."""
        mine = [problems[index] for index in self._share(range(len(problems)))]
        generated, mask = self._generate(mine, 1)
        if generated is None or mask is None:
            return 0
        return count_solved(self.tokenizer, mine, generated.tokens[:, mask.shape[1] :])

    def place(self, trace: RoutingTrace) -> dict[str, float]:
        """Place experts by the routing of a step, before their weights are sent. Returns metrics.

        Args:
            trace: of this rank's sequences.
        """
        counts = torch.from_numpy(count_experts(trace, np.zeros(trace.num_sequences), 1, np.int64)[0]).to(self._device)
        dist.all_reduce(counts)
        load_XL = self.rollout.load_XL
        mean_L = load_XL.mean(axis=0)
        vio_L = (load_XL.max(axis=0) - mean_L) / np.maximum(mean_L, 1)
        # A step may train no sequences.
        replaced = self.rollout.place(counts.cpu().numpy()) if counts.any() else 0
        return {"rollout/expert_max_vio": float(vio_L.mean()), "rollout/replaced_experts": float(replaced)}

    def _share(self, order: Sequence_[int]) -> list[int]:
        """This rank's part of problems in this order; none on expert ranks."""
        parts = np.array_split(order, self.rollout.num_attention)
        return parts[dist.get_rank()].tolist() if self.rollout.weights_L is None else []

    def _generate(
        self, problems: Sequence_[Problem], samples: int, uniforms: Array | None = None
    ) -> tuple[Generated | None, torch.Tensor | None]:
        """Responses and the mask of prompts; None without problems."""
        repeated = [problem for problem in problems for _ in range(samples)]
        prompts = encode(self.tokenizer, repeated, self._device) if repeated else None
        generated = self.rollout.generate(
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            uniforms=uniforms,
        )
        return generated, None if prompts is None else prompts["attention_mask"].cpu()

    def _ended_first(self, sequences: list[Sequence]) -> list[Sequence]:
        """The responses that had ended when most of them had, as `rl.rollout.Finished` reports them; else none."""
        has_end = [s.token_ids[-1] == self.tokenizer.eos_token_id for s in sequences]
        ends = np.array([s.response_length if end else np.inf for s, end in zip(sequences, has_end, strict=True)])
        for last in np.unique(ends[ends < np.inf]):
            if (ends <= last).mean() >= MOST:
                return [sequence for sequence, end in zip(sequences, ends, strict=True) if end <= last]
        return []
