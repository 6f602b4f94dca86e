"""transformers' models in live micro-steps: loss and gradients of the unbalanced model, with padding on either side."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from helpers.equality import relative_error
from helpers.moe_families import MODEL_TYPES, random_model, small_config
from helpers.random_choices import quotas_of_few
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from trimtab.integrations.transformers import distribute_experts, num_experts
from trimtab.runtime import Session
from trimtab.runtime.live import balancer

STEPS, MICRO_STEPS, BATCH, LENGTH, VOCAB = 2, 2, 4, 12, 30


@dataclass(frozen=True)
class Case:
    """One comparison. Layers run again in backward with checkpointing, reentrant or not. Padding is on the left or
    right; it stays out of the experts if the micro-steps get the positions of tokens."""

    model_type: str
    policy: str
    seed: int
    checkpointing: bool | None = None
    left: bool = False
    marked: bool = True


class Shared:
    """A copy of a model in a session, with an optimizer."""

    def __init__(self, plain: Any, case: Case, **options: Any) -> None:
        self.model: Any = AutoModelForCausalLM.from_config(plain.config, dtype=torch.float64)
        self.model.load_state_dict(plain.state_dict())
        self.session = Session(num_experts=num_experts(plain.config), **options)
        distribute_experts(self.model, self.session)
        if case.checkpointing is not None:
            self.model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing})
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=0.1)

    def accumulate(self, case: Case, step: int) -> torch.Tensor:
        """The loss of a step over all ranks; gradients are summed. Backwards run after all forwards."""
        losses = []
        for index in range(MICRO_STEPS):
            tokens, mask = batch_of(case, (step, index, dist.get_rank()))
            positions = mask.flatten().nonzero()[:, 0] if case.marked else None
            with self.session.live_micro_step(positions=positions):
                losses.append(loss_of(self.model, tokens, mask))
        for loss in losses:
            loss.backward()
        self.session.finish_gradients(self.session.replicated_parameters(self.model))
        total = torch.stack(losses).detach().sum()
        dist.all_reduce(total)
        return total


def batch_of(case: Case, number: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed tokens `[BATCH, LENGTH]` and their mask; one sequence has no padding."""
    generator = torch.Generator().manual_seed(hash((case.seed, *number)))
    popularity = 1 / torch.arange(1, VOCAB) ** 2.0
    tokens = 1 + torch.multinomial(popularity, BATCH * LENGTH, replacement=True, generator=generator)
    lengths = torch.randint(3, LENGTH, (BATCH, 1), generator=generator)
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths
    mask = mask.flip(1) if case.left else mask
    return tokens.view(BATCH, LENGTH) * mask, mask


def loss_of(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A sum over the targets that follow a token."""
    logits = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
    counted = mask[:, :-1] & mask[:, 1:]
    return F.cross_entropy(logits[counted], tokens[:, 1:][counted], reduction="sum") / 100


@pytest.mark.nightly
@runs_on_ranks()
@mock.patch.object(balancer, "choose_quotas", quotas_of_few)
def test_live_micro_steps_of_every_family_train_as_unbalanced_ones() -> None:
    torch.set_num_threads(1)
    for seed, (model_type, policy) in enumerate(product(MODEL_TYPES, ("quota", "feplb"))):
        compare(Case(model_type, policy, seed, (None, False, True)[seed % 3], left=seed % 2 == 1, marked=seed % 4 != 3))


def compare(case: Case) -> None:
    torch.manual_seed(case.seed)
    plain = random_model(small_config(case.model_type), torch.float64)
    unbalanced = Shared(plain, case, mode="off")
    balanced = Shared(plain, case, mode="live", policy=case.policy)
    for step in range(STEPS):
        expected, loss = unbalanced.accumulate(case, step), balanced.accumulate(case, step)
        assert relative_error(loss, expected) < 1e-6, (case, loss, expected)
        for (name, wanted), (_, actual) in zip(
            unbalanced.model.named_parameters(), balanced.model.named_parameters(), strict=True
        ):
            assert (actual.grad is None) == (wanted.grad is None), (case, name)
            assert wanted.grad is None or relative_error(actual.grad, wanted.grad) < 1e-5, (case, name)
        for shared in (unbalanced, balanced):
            shared.optimizer.step()
            shared.optimizer.zero_grad()
        figures = balanced.session.take_metrics()
        assert figures["live/calls"] > 0, case
        if case.policy in ("quota", "feplb"):
            assert figures["live/replicas"] > 0, case
            assert sum(of_all_ranks(figures["transfer/gradient_bytes"])) > 0, case
            assert figures["live/max_vio_after"] < figures["live/max_vio_before"], case
        assert "live/calls" not in unbalanced.session.take_metrics()
    balanced.session.close()
    unbalanced.session.close()
