"""Attention and experts on different ranks: tokens, log-probabilities and routing of the whole model; odd batches."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from helpers.disaggregated import assert_as_whole, draws, generate, make_rollout, padded_prompts, whole_model
from helpers.examples import nightly_except
from helpers.moe_families import MODEL_TYPES, MOE_LAYERS, NUM_EXPERTS, TOP_K, router_of
from helpers.rank_pool import on_ranks
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from recipes.disaggregated_rollout.channels import Channel
from recipes.disaggregated_rollout.rollout import DisaggregatedRollout
from trimtab.errors import RankFailedError
from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import choose_experts
from trimtab.launch import launch

pytestmark = pytest.mark.nightly
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# All sizes with two families, the others once.
CASES = [(family, *ranks) for family in ("qwen3_moe", "mixtral") for ranks in RANKS]
CASES += [(family, 1, 2) for family in MODEL_TYPES if family not in ("qwen3_moe", "mixtral")]


def compare(family: str, attention: int, experts: int) -> None:
    model, rank = whole_model(family), dist.get_rank()
    prompts = padded_prompts(5 - rank, seed=rank)
    of_greedy: set[str] = set()
    sampled: set[str] = set()
    fed_here = 0
    for micro_batches in (1, 2, 3):
        rollout = make_rollout(
            family, attention_ranks=attention, expert_ranks=experts, micro_batches=micro_batches, copies=1
        )
        for uniforms, seen in ((None, of_greedy), (draws(5 - rank, rank), sampled)):
            found = generate(rollout, prompts, uniforms)
            if found is not None:
                responses = assert_as_whole(model, found, prompts, uniforms)
                fed_here = int(prompts["attention_mask"].sum()) + sum(len(each) - 1 for each in responses)
                seen.add(str(responses))
        # Every choice of a real token was computed once, in each layer.
        fed = sum(of_all_ranks(fed_here))
        assert rollout.load_XL.sum(axis=0).tolist() == [TOP_K * fed] * len(MOE_LAYERS[family])
    if rank < attention:
        assert len(of_greedy) == len(sampled) == 1
        assert of_greedy != sampled


@pytest.mark.parametrize(("family", "attention", "experts"), nightly_except(CASES, ("gpt_oss", 1, 2)))
def test_tokens_and_routing_are_those_of_the_whole_model(family: str, attention: int, experts: int) -> None:
    on_ranks(compare, (family, attention, experts), ranks=attention + experts)


@pytest.mark.parametrize("count", [0, 1, 2])
@runs_on_ranks(3)
def test_a_batch_may_be_smaller_than_the_number_of_micro_batches(count: int) -> None:
    rollout = make_rollout("mixtral", attention_ranks=2, expert_ranks=1, micro_batches=3)
    # The other attention rank has a batch of its own.
    size = count if dist.get_rank() == 0 else 4
    prompts, uniforms = padded_prompts(size, 1), draws(size, 1)
    if (found := generate(rollout, prompts, uniforms)) is not None:
        assert found.tokens.shape[0] == size
        assert_as_whole(whole_model("mixtral"), found, prompts, uniforms)


@runs_on_ranks()
def test_all_sequences_but_one_may_end_at_once() -> None:
    model = whole_model("qwen3_moe")
    prompts = padded_prompts(7, 3)
    prompts = {name: value[[0, 0, 0, 1, 0, 0]] for name, value in prompts.items()}
    with torch.no_grad():
        end = int(model(input_ids=prompts["input_ids"][:1]).logits[0, -1].argmax())
    rollout = make_rollout("qwen3_moe", attention_ranks=1, expert_ranks=1, micro_batches=2)
    found = generate(rollout, prompts, None, end)
    mine = 0
    if found is not None:
        lengths = [len(each) for each in assert_as_whole(model, found, prompts, None, end)]
        assert lengths[:3] + lengths[4:] == [1] * 5
        mine = lengths[3] - 1
    fed = int(prompts["attention_mask"].sum()) + sum(of_all_ranks(mine))
    assert fed > int(prompts["attention_mask"].sum())
    # Sequences that have ended are not computed.
    assert rollout.load_XL.sum(axis=0).tolist() == [TOP_K * fed] * 2


def choose_always(model: Any, ids_K: list[int]) -> None:
    for block in moe_blocks(model).values():

        def choose(live_ids: torch.Tensor) -> torch.Tensor:
            return torch.tensor(ids_K).repeat(len(live_ids), 1)

        choose_experts(router_of(block), model.config, choose)


@runs_on_ranks(3)
def test_an_expert_rank_may_get_no_token() -> None:
    rollout = make_rollout("mixtral", attention_ranks=1, expert_ranks=2, micro_batches=2)
    # The first experts of the first rank in every layer, as placed without a known load.
    slots_LXS = rollout.slots.slots_LXS
    assert (slots_LXS == slots_LXS[:1]).all()
    chosen = slots_LXS[0, 0, :TOP_K].tolist()
    rollout = make_rollout(
        "mixtral", lambda model: choose_always(model, chosen), attention_ranks=1, expert_ranks=2, micro_batches=2
    )
    model = whole_model("mixtral")
    choose_always(model, chosen)
    prompts = padded_prompts(4, 0)
    if (found := generate(rollout, prompts, None)) is not None:
        assert_as_whole(model, found, prompts, None)
    assert rollout.load_XL[0].all()
    assert not rollout.load_XL[1].any()


def run_and_kill(victim: int) -> None:
    rollout = make_rollout("qwen3_moe", attention_ranks=1, expert_ranks=2, micro_batches=2)
    receive, calls = Channel.receive, [0]

    def die_at_call(channel: Channel) -> Any:
        calls[0] += 1
        if dist.get_rank() == victim and calls[0] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(channel)

    with mock.patch.object(Channel, "receive", die_at_call):
        generate(rollout, padded_prompts(6, 0), None)
    raise AssertionError("the rollout should not end")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_run_with_its_name(victim: int) -> None:
    with pytest.raises(RankFailedError, match=rf"rank {victim} \(process \d+\) was killed by SIGKILL"):
        launch(run_and_kill, (victim,), ranks=3)


@runs_on_ranks(3)
def test_every_rank_keeps_only_its_part() -> None:
    rollout: DisaggregatedRollout = make_rollout(
        "mixtral", attention_ranks=1, expert_ranks=2, micro_batches=1, copies=1
    )
    kept = sum(p.numel() for p in rollout.model.parameters() if p.device.type != "meta")
    whole = whole_model("mixtral")
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in whole.parameters()) - experts
    if rollout.is_attention:
        assert kept == others
    else:
        held = sum(tensor.numel() for tensors in rollout.weights_L for tensor in tensors.values())
        assert (kept, held) == (0, experts * (NUM_EXPERTS // 2 + 1) // NUM_EXPERTS)
