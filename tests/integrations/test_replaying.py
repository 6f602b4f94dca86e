"""Replay of routing without a session in every model family, compared with routers that are called directly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from helpers.moe_families import MODEL_TYPES, NUM_EXPERTS, TOP_K, all_chosen
from helpers.routers import PAD, choices, fetched_calls, joined, left_padded, model_of, routers
from helpers.routers import one_thread as one_thread
from trimtab import InputError, RoutingTrace
from trimtab.integrations.transformers import record_routing, replay_routing


def sequences_of(model: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, RoutingTrace]:
    """Right-padded sequences, their mask, and the routing that a bfloat16 copy of the model chooses for them."""
    rng = np.random.default_rng(seed)
    lengths = [9, 4, 7]
    tokens, mask = torch.full((3, 9), PAD), torch.zeros(3, 9, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.from_numpy(rng.integers(1, 15, length))
        mask[row, :length] = 1
    rough = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    rough.load_state_dict(model.state_dict())
    with record_routing(rough) as record, torch.no_grad():
        rough(input_ids=tokens, attention_mask=mask)
    return tokens, mask, record.trace(tokens, mask)


def logits_and_gradients(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, run: Callable[..., Any] = lambda forward: forward()
) -> list[Any]:
    """Those of a loss. The forward is called by `run`."""
    model.zero_grad()
    logits = run(lambda: model(input_ids=tokens, attention_mask=mask, use_cache=False).logits)
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    (log_probs * mask[:, 1:]).sum().backward()
    return [logits.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_of_a_models_own_choice_changes_no_bit(model_type: str, dtype: torch.dtype) -> None:
    model = model_of(model_type, dtype)
    prompts, mask = left_padded()
    with record_routing(model) as record:
        expected = logits_and_gradients(model, prompts, mask)
    trace = record.trace(prompts, mask)
    with replay_routing(model, trace, mask):
        actual = logits_and_gradients(model, prompts, mask)
    assert equal(actual, expected)
    for router in routers(model):
        assert router.weight.grad.abs().sum() > 0
        assert not router._forward_hooks


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_float32_training_replays_a_bfloat16_rollout(model_type: str) -> None:
    model = model_of(model_type, seed=5)
    tokens, mask, _ = sequences_of(model)
    # The rollout's own choice differs here and there; take a random one of a third of the tokens, so that all differ.
    rng = np.random.default_rng(1)
    _, _, trace = sequences_of(model)
    for token in range(0, trace.num_tokens, 3):
        trace.expert_ids[token] = [rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(trace.num_layers)]
    trace.expert_ids[4] = trace.no_route  # of the first sequence
    with choices(model) as live, torch.no_grad(), replay_routing(model, trace, mask), record_routing(model) as record:
        logits = model(input_ids=tokens, attention_mask=mask).logits
    recorded = record.trace(tokens, mask)
    known = np.arange(trace.num_tokens) != 4
    assert np.array_equal(recorded.expert_ids[known], trace.expert_ids[known])
    assert np.array_equal(recorded.expert_ids[4], joined(live, 3)[0, 4])

    # By hand: row by row, without padding, with routers whose `topk` answers the recorded ids.
    with torch.no_grad():
        for row in range(3):
            ids_NLK = torch.from_numpy(recorded.sequence(row).astype(np.int64))
            with all_chosen(model, ids_NLK):
                plain = model(input_ids=tokens[row : row + 1, : len(ids_NLK)], use_cache=False).logits[0]
            assert torch.allclose(logits[row, : len(ids_NLK)], plain, rtol=1e-4, atol=1e-4)
        own = model(input_ids=tokens, attention_mask=mask).logits
    assert not torch.allclose(own[:, :4], logits[:, :4], rtol=1e-2, atol=1e-2)

    # Fed without their last tokens, sequences have the same rows.
    fed = mask.clone()
    fed[torch.arange(3), mask.sum(dim=1) - 1] = 0
    with torch.no_grad(), replay_routing(model, trace, fed[:, :-1]):
        shorter = model(input_ids=tokens[:, :-1], attention_mask=fed[:, :-1]).logits
    assert torch.allclose(shorter[0], logits[0, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_checkpointed_layers_run_again_on_the_same_routing(model_type: str, use_reentrant: bool) -> None:
    model = model_of(model_type, seed=2)
    tokens, mask, trace = sequences_of(model, seed=3)
    with replay_routing(model, trace, mask):
        expected = logits_and_gradients(model, tokens, mask)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with record_routing(model) as record, choices(model) as seen, replay_routing(model, trace, mask):
        actual = logits_and_gradients(model, tokens, mask)
    assert [len(calls) for calls in seen] == [2] * trace.num_layers  # forward, and again in backward
    with fetched_calls() as fetched:
        assert np.array_equal(record.trace(tokens, mask).expert_ids, trace.expert_ids)
    assert fetched == [1]
    assert equal(actual, expected)
    with replay_routing(model, trace, mask):
        loss = model(input_ids=tokens, attention_mask=mask).logits.sum()
    with pytest.raises(RuntimeError, match=r"runs a layer again after replay_routing\(\) has ended"):
        loss.backward()
    with record_routing(model) as record:  # and without replay
        logits_and_gradients(model, tokens, mask)
    with fetched_calls() as fetched:
        record.trace(tokens, mask)
    assert fetched == [1]


def test_a_checkpointed_whole_model_replays_in_backward() -> None:
    model = model_of("deepseek_v3")
    tokens, mask, trace = sequences_of(model)
    with replay_routing(model, trace, mask):
        expected = logits_and_gradients(model, tokens, mask)
        with record_routing(model) as record:
            actual = logits_and_gradients(model, tokens, mask, partial(checkpoint, use_reentrant=False))
    assert equal(actual, expected)
    assert np.array_equal(record.trace(tokens, mask).expert_ids, trace.expert_ids)


def test_the_innermost_replay_applies() -> None:
    model = model_of("mixtral")
    tokens, mask, trace = sequences_of(model)
    other = RoutingTrace.from_sequences(
        [np.sort((trace.sequence(s) + 1) % NUM_EXPERTS) for s in range(3)], num_experts=NUM_EXPERTS
    )
    with torch.no_grad(), replay_routing(model, trace, mask):
        with record_routing(model) as record, replay_routing(model, other, mask):
            model(input_ids=tokens, attention_mask=mask)
        assert np.array_equal(record.trace(tokens, mask).expert_ids, other.expert_ids)
        with record_routing(model) as record:
            model(input_ids=tokens, attention_mask=mask)
        assert np.array_equal(record.trace(tokens, mask).expert_ids, trace.expert_ids)


def test_a_batch_that_does_not_fit_is_refused_in_one_line() -> None:
    model = model_of("qwen3_moe")
    tokens, mask, trace = sequences_of(model)
    ids = [trace.sequence(s) for s in range(3)]
    for bad, batch, message in (
        (trace, mask[:2], r"attention_mask has shape \(2, 9\); for the trace's 3 sequences it should be \[3, tokens\]"),
        (trace.select([0, 1, 0]), mask, "7 ones in row 2; sequence 2 of the trace has 8 routed tokens"),
        (RoutingTrace.from_sequences(ids, num_experts=16), mask, "has 2 MoE layers, 16 experts, top-3; this qwen3_moe"),
        (RoutingTrace.from_sequences([x[:, :1] for x in ids], num_experts=8), mask, "the trace has 1 MoE layer,"),
        (RoutingTrace.from_sequences([x[..., :2] for x in ids], num_experts=8), mask, "8 experts, top-2; this"),
        (
            RoutingTrace.from_sequences(ids, num_experts=8, layer_indices=[1, 2]),
            mask,
            r"of decoder layers \[1, 2\]; this model's MoE layers are \[0, 2\]",
        ),
        (RoutingTrace.from_sequences([x * 0 for x in ids], num_experts=8), mask, "token 0 in MoE layer 0"),
    ):
        with pytest.raises(InputError, match=message) as caught, replay_routing(model, bad, batch):
            pass
        assert "\n" not in str(caught.value)
    with (
        pytest.raises(InputError, match="given 3 tokens under replay_routing; attention_mask has 27 places"),
        replay_routing(model, trace, mask),
    ):
        model(input_ids=tokens[:, :1])
    assert not any(router._forward_hooks for router in routers(model))
