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
from trimtab.errors import InputError, RankFailedError
from trimtab.integrations.transformers import moe_blocks
from trimtab.integrations.transformers.families import reroute
from trimtab.launch import launch
from trimtab.rollout import DisaggregatedRollout, disaggregate
from trimtab.rollout.channels import Channel
from trimtab.rollout.turns import Turns

RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# All sizes with two families, the others once.
CASES = [(family, *ranks) for family in ("qwen3_moe", "mixtral") for ranks in RANKS]
CASES += [(family, 1, 2) for family in MODEL_TYPES if family not in ("qwen3_moe", "mixtral")]


def compare(family: str, attention: int, experts: int) -> None:
    model, rank = whole_model(family), dist.get_rank()
    prompts = padded_prompts(5 - rank, seed=rank)
    of_greedy: set[str] = set()
    sampled: set[str] = set()
    for micro_batches in (1, 2, 3):
        rollout = make_rollout(
            family, attention_ranks=attention, expert_ranks=experts, micro_batches=micro_batches, copies=1
        )
        for uniforms, seen in ((None, of_greedy), (draws(5 - rank, rank), sampled)):
            found = generate(rollout, prompts, uniforms)
            if found is not None:
                seen.add(str(assert_as_whole(model, found, prompts, uniforms)))
        # Every choice of a real token was computed once, in each layer.
        fed = sum(
            of_all_ranks(0 if found is None else int(prompts["attention_mask"].sum() + (found.lengths - 1).sum()))
        )
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
    if found is not None:
        assert_as_whole(model, found, prompts, None, end)
        lengths = found.lengths.tolist()
        assert lengths[3] > 1
        assert lengths[:3] + lengths[4:] == [1] * 5
    fed = int(prompts["attention_mask"].sum()) + sum(of_all_ranks(0 if found is None else int(found.lengths[3]) - 1))
    # Sequences that have ended are not computed.
    assert rollout.load_XL.sum(axis=0).tolist() == [TOP_K * fed] * 2


def choose_always(model: Any, ids_K: list[int]) -> None:
    for block in moe_blocks(model).values():

        def choose(_router: Any, _args: Any, output: Any) -> Any:
            return reroute(model.config, output, torch.tensor(ids_K).expand(len(output[0]), -1))

        router_of(block).register_forward_hook(choose)


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


def run_with_altered_header(field: int, value: int) -> None:
    rollout = make_rollout("mixtral", attention_ranks=1, expert_ranks=1, micro_batches=2)
    isend = dist.isend

    def altered(message: torch.Tensor, rank: int, **how: Any) -> Any:
        header = message[:24].view(torch.int64)
        if rank == 1 and header[:2].tolist() == [1, 4]:
            header[field] = value
        return isend(message, rank, **how)

    with mock.patch.object(dist, "isend", altered):
        generate(rollout, padded_prompts(4, 0), None)


@pytest.mark.parametrize(("field", "value"), [(0, 0), (1, 5), (2, 1), (2, -1), (2, 1000)])
def test_an_altered_header_ends_the_run(field: int, value: int) -> None:
    with pytest.raises(AssertionError, match=r"RanksDisagreeError: rank 0 sent .* rows .*\[1, 4\] were expected"):
        on_ranks(run_with_altered_header, (field, value), ranks=2)


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


@runs_on_ranks()
def test_sizes_that_do_not_fit_are_refused_and_leave_the_model_as_it_was() -> None:
    model = whole_model("mixtral")
    for sizes, message in (
        ((1, 2, 1), "1 attention ranks and 2 expert ranks are 3; together they should be the 2 ranks"),
        ((2, 0, 1), "should be at least 1"),
        ((1, 1, 0), "should be at least 1"),
    ):
        attention, experts, micro_batches = sizes
        with pytest.raises(InputError, match=message):
            disaggregate(model, attention_ranks=attention, expert_ranks=experts, micro_batches=micro_batches)
    model.config.model_type = "llama"
    with pytest.raises(InputError, match="'llama' is not supported"):
        disaggregate(model, attention_ranks=1, expert_ranks=1, micro_batches=1)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@runs_on_ranks(3)
def test_what_is_wrong_on_one_rank_is_raised_on_all() -> None:
    rollout, mine = make_rollout("mixtral", attention_ranks=2, expert_ranks=1, micro_batches=1), draws(4, 0)
    prompts = padded_prompts(4, 0)
    if dist.get_rank() == 1:
        mine = mine[:3]
    with pytest.raises(InputError, match=r"rank 1: uniforms are \[3, 12\]; they should be \[4, 12\]"):
        generate(rollout, prompts, mine)
    if dist.get_rank() == 0:
        prompts = {name: value.flip(1) for name, value in prompts.items()}
    with pytest.raises(InputError, match="rank 0: the padding of prompts should be on the left"):
        generate(rollout, prompts, None)


@runs_on_ranks(3)
def test_every_rank_keeps_only_its_part() -> None:
    rollout: DisaggregatedRollout = make_rollout(
        "mixtral", attention_ranks=1, expert_ranks=2, micro_batches=1, copies=1
    )
    kept = sum(p.numel() for p in rollout.model.parameters() if p.device.type != "meta")
    whole = whole_model("mixtral")
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in whole.parameters()) - experts
    if rollout.weights_L is None:
        assert kept == others
    else:
        held = sum(tensor.numel() for tensors in rollout.weights_L for tensor in tensors)
        assert (kept, held) == (0, experts * (NUM_EXPERTS // 2 + 1) // NUM_EXPERTS)


def test_turns_go_round_and_a_failure_ends_all() -> None:
    turns, order = Turns(3), []

    def work(index: int) -> None:
        for _ in range(2 + index):
            order.append(index)
            turns.give_way()

    turns.run(work)
    assert order == [0, 1, 2, 0, 1, 2, 1, 2, 2]
    failing = Turns(3)

    def fail(index: int) -> None:
        failing.give_way()
        if index == 1:
            raise ValueError("here")
        failing.give_way()

    with pytest.raises(ValueError, match="here"):
        failing.run(fail)
