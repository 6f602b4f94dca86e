"""Recording and replay of routing without a session, in every family, against routers that are called by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Cache, DynamicCache

from helpers.moe_families import (
    MODEL_TYPES,
    MOE_LAYERS,
    NUM_EXPERTS,
    TOP_K,
    chosen,
    random_model,
    router_of,
    small_config,
)
from trimtab import InputError, RoutingTrace
from trimtab.integrations.transformers import moe_blocks, record_routing, recording, replay_routing
from trimtab.integrations.transformers.passes import Call, Pass
from trimtab.trace import hash_tokens

END, PAD = 15, 0
PROMPTS = ([3, 1, 4, 1, 5], [2, 7], [9, 8, 6])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return random_model(small_config(model_type, **changes), dtype).eval()


def left_padded(prompts: Any = PROMPTS) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return tokens, mask


def routers(model: Any) -> list[Any]:
    return [router_of(block) for block in moe_blocks(model).values()]


@contextmanager
def choices(model: Any) -> Iterator[list[list[torch.Tensor]]]:
    """What each router answers of itself, call by call: computed again by its class, from the input it was given."""
    seen: list[list[torch.Tensor]] = [[] for _ in routers(model)]

    def note(layer: int, router: Any, hidden: torch.Tensor) -> None:
        with torch.no_grad():
            seen[layer].append(type(router).forward(router, hidden)[2])

    with ExitStack() as stack:
        for layer, router in enumerate(routers(model)):
            hook = router.register_forward_pre_hook(lambda r, args, layer=layer: note(layer, r, args[0]))
            stack.callback(hook.remove)
        yield seen


def joined(seen: list[list[torch.Tensor]], rows: int) -> np.ndarray[Any, Any]:
    """`[rows, t, L, K]` of all calls one after another."""
    layers = [torch.cat([ids.reshape(rows, -1, TOP_K) for ids in calls], dim=1) for calls in seen]
    return torch.stack(layers, dim=2).numpy()


def until_end(response: list[int]) -> list[int]:
    return response[: response.index(END) + 1] if END in response else response


@contextmanager
def ending(model: Any, rows: list[int], place: int) -> Iterator[None]:
    """Let the model emit the end token in some rows once `place` tokens are in their cache, and never elsewhere."""

    def force(_model: Any, _args: Any, kwargs: Any, output: Any) -> None:
        output.logits[:, -1, END] = -1e9
        if kwargs["past_key_values"].get_seq_length() == place:
            output.logits[rows, -1, END] = 1e9

    handle = model.register_forward_hook(force, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generation_leaves_with_left_padding_and_finished_rows_cut_off(model_type: str) -> None:
    model = model_of(model_type)
    prompts, mask = left_padded()
    for how in ({"do_sample": False}, {"do_sample": True}, {"prefill_chunk_size": 2}, {"use_cache": False}):
        cached = how.get("use_cache", True)
        with record_routing(model) as record, choices(model) as seen, ExitStack() as stack:
            if cached:
                stack.enter_context(ending(model, [1], 7))
            tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=6, **how)
        trace = record.trace(tokens, mask, eos_token_id=END, step=4)
        if cached:
            assert tokens[1, 7].item() == END
            assert (tokens[1, 8:] == PAD).all()
            expected = joined(seen, len(PROMPTS))
        else:  # the last call was fed everything
            expected = torch.stack([calls[-1].reshape(len(PROMPTS), -1, TOP_K) for calls in seen], dim=2).numpy()
        assert np.array_equal(record.expert_ids(tokens), expected)
        for row, prompt in enumerate(PROMPTS):
            sequence = prompt + until_end(tokens[row, 5:].tolist())
            pad = 5 - len(prompt)
            assert np.array_equal(trace.sequence(row), expected[row, pad : pad + len(sequence) - 1])
            assert trace.sequence_hashes[row] == hash_tokens(sequence)
        assert trace.prompt_lengths.tolist() == [5, 2, 3]
        assert trace.layer_indices.tolist() == MOE_LAYERS[model_type]
        assert (trace.num_experts, trace.model, set(trace.steps)) == (NUM_EXPERTS, model_type, {4})
        trace.check()
    assert not any(router._forward_hooks for router in routers(model))
    assert not any(block.experts._forward_pre_hooks for block in moe_blocks(model).values())
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks
    assert Cache.reorder_cache.__qualname__ == "Cache.reorder_cache"


def test_several_generations_are_told_apart_by_their_tokens() -> None:
    model = model_of("qwen3_moe")
    prompts, mask = left_padded()
    with record_routing(model) as record:
        first = model.generate(prompts, attention_mask=mask, max_new_tokens=4, do_sample=True, num_return_sequences=2)
        alone = record.expert_ids(first)
        others = model.generate(prompts[:, 1:] % 7 + 1, max_new_tokens=5, do_sample=False)
    assert np.array_equal(record.expert_ids(first), alone)
    order = [4, 0, 3]
    again = record.trace(first[order], mask.repeat_interleave(2, dim=0)[order])
    assert np.array_equal(again.sequence(1), record.trace(first, mask.repeat_interleave(2, dim=0)).sequence(0))
    assert record.trace(others, torch.ones_like(prompts[:, 1:])).sequence_lengths.tolist() == [8, 8, 8]
    record.clear()
    with pytest.raises(InputError, match="sequence 0 was not recorded: no forward was fed its 8 tokens"):
        record.expert_ids(first)


def test_the_latest_of_equal_sequences_counts() -> None:
    model = model_of("mixtral")
    tokens = torch.randint(1, 15, (2, 9))
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=tokens)
        before = record.expert_ids(tokens)
        for router in routers(model):
            router.weight.neg_()
        model(input_ids=tokens)
    after = record.expert_ids(tokens)
    assert not np.array_equal(before, after)
    with choices(model) as seen, torch.no_grad():
        model(input_ids=tokens)
    assert np.array_equal(after, joined(seen, 2)[:, :-1])


def test_a_cache_that_goes_on_over_several_calls() -> None:
    model = model_of("gpt_oss")
    tokens = torch.randint(1, 15, (2, 12))
    with record_routing(model) as record, choices(model) as seen, torch.no_grad():
        cache = model(input_ids=tokens[:, :4], use_cache=True).past_key_values
        model(input_ids=tokens[:, 4:7], past_key_values=cache)
        other = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :3].flip(0), past_key_values=other)  # another conversation in between
        for layer in seen:
            layer.pop()
        model(input_ids=tokens[:, 7:11], past_key_values=cache)
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 2))
    turns = record.trace(tokens, torch.ones_like(tokens), prompt_lengths=[4, 20])
    assert turns.prompt_lengths.tolist() == [4, 11]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_tokens_that_speculation_takes_back_are_not_recorded(model_type: str) -> None:
    model = model_of(model_type)
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 3, 1, 4]])
    with record_routing(model) as record, choices(model) as seen:
        tokens = model.generate(prompt, max_new_tokens=12, prompt_lookup_num_tokens=4, do_sample=False, eos_token_id=14)
    assert joined(seen, 1).shape[1] > tokens.shape[1] - 1  # some were taken back
    with choices(model) as plain, torch.no_grad():
        model(input_ids=tokens[:, :-1])
    assert np.array_equal(np.sort(record.expert_ids(tokens)), np.sort(joined(plain, 1)))


def test_a_static_cache_counts_on_its_device() -> None:
    model = model_of("qwen3_moe")
    prompts, mask = left_padded()
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    with record_routing(model) as record, choices(model) as seen:
        tokens = model.generate(prompts, cache_implementation="static", **how)
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 3))


def test_what_cant_be_told_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    prompts, mask = left_padded()

    def refused(record: Any, tokens: torch.Tensor, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            record.trace(tokens, torch.ones_like(tokens))
        assert "\n" not in str(caught.value)

    beams = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "max_new_tokens": 4}
    with record_routing(model) as record:
        tokens = model.generate(prompts, attention_mask=mask, **beams)
        refused(record, tokens, "since beam search shuffles the rows of its cache. Give tokens")
        tokens = model.generate(prompts, attention_mask=mask, use_cache=False, **beams)
        record.trace(tokens, mask.repeat_interleave(3, dim=0), eos_token_id=END).check()

    tokens = torch.randint(1, 15, (2, 9))
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :4], use_cache=True).past_key_values
        with record_routing(model) as record:
            model(input_ids=tokens[:, 4:], past_key_values=cache)
        refused(record, tokens, "since 4 tokens were in the cache before recording began")
        with record_routing(model) as record:
            cache = model(input_ids=tokens[:, :4], use_cache=True).past_key_values
            cache.batch_select_indices(torch.tensor([1]))
            model(input_ids=tokens[1:, 4:], past_key_values=cache)
        refused(record, tokens, "since a batch went from 2 to 1 rows in mid-sequence")
        with record_routing(model) as record:
            model(inputs_embeds=model.model.embed_tokens(tokens))
        refused(record, tokens, "since the model was fed embeddings instead of token ids")
        with record_routing(model) as record, monkeypatch.context() as patch:
            patch.setattr(model.config, "num_hidden_layers", 1)
            model(input_ids=tokens)
        refused(record, tokens, "since only 1 of 2 MoE layers ran")
        with record_routing(model) as record:
            model(input_ids=tokens)
        refused(record, tokens.flip(1), "sequence 0 was not recorded: no forward was fed its 8 tokens. Give tokens")
    for bad, message in (
        (torch.ones(2, 10), "the mask does not fit tokens of width 9"),
        (torch.tensor([[1, 1, 1], [1, 1, 0]]), "row 1 of the mask does not fit .* left-padded prompts"),
        (torch.tensor([[1, 0, 1], [1, 1, 1]]), "row 0 of the mask"),
        (torch.tensor([[0, 0, 0], [1, 1, 1]]), "row 0 of the mask"),
        (torch.ones(1, 3), r"tokens have shape \(2, 9\) and the mask \(1, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            record.trace(tokens, bad)


def test_a_failed_forward_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    tokens = torch.randint(1, 15, (2, 6))
    with record_routing(model) as record, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2], "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=tokens)
        routers(model)[0](torch.zeros(3, 32))
        model.model.layers[0].mlp(torch.zeros(1, 3, 32))  # outside of a forward
        model(input_ids=tokens)
    assert len(record._calls) == 1
    assert record.expert_ids(tokens).shape == (2, 5, 2, TOP_K)


def test_blocks_of_calls_leave_the_device_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("glm4_moe")
    prompts, mask = left_padded()
    monkeypatch.setattr(recording, "BLOCK_BYTES", 50)  # three decode calls
    with record_routing(model) as record, choices(model) as seen:
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=12, do_sample=True, eos_token_id=None)
        assert len(record._calls) < 3
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 3))


def test_more_experts_than_a_byte_holds() -> None:
    model = model_of("qwen3_moe", num_experts=300, num_experts_per_tok=4)
    with torch.no_grad():
        for router in routers(model):
            router.weight[:200].zero_()  # so that large ids are chosen
    tokens = torch.randint(1, 15, (4, 20))
    with record_routing(model) as record, choices(model) as seen, torch.no_grad():
        model(input_ids=tokens)
    ids = record.trace(tokens, torch.ones_like(tokens)).expert_ids
    assert ids.dtype == np.uint16
    assert ids.max() > 255
    expected = torch.stack([calls[0].reshape(4, 20, 4) for calls in seen], dim=2)[:, :-1]
    assert np.array_equal(ids.reshape(4, 19, 2, 4), expected.numpy())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=6), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_a_pass_keeps_the_last_thing_fed_at_every_place(calls: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    grown = Pass()
    tokens, ids = np.zeros((2, 0), np.int32), np.zeros((2, 0, 1, 2), np.uint8)
    for past, width in calls:
        past = min(past, tokens.shape[1])
        # Rows that are told apart by any token.
        fed, used = rng.integers(0, 50, (2, width)) + np.array([[0], [50]]), rng.integers(0, 200, (1, 2 * width, 2))
        grown.feed(Call(0, past, fed.astype(np.int32), used.astype(np.uint8)))
        before, tokens = tokens, np.concatenate([tokens[:, :past], fed], axis=1)
        ids = np.concatenate([ids[:, :past], used[0].reshape(2, width, 1, 2)], axis=1)
        if rng.random() < 0.3:
            assert grown.find(tokens[1], 1) is not None
        taken_back = before[0, tokens.shape[1] :]
        if len(taken_back):
            assert grown.find(np.append(tokens[0], taken_back), 0) is None
    for row in range(2):
        for hint in (row, 7):
            found = grown.find(tokens[row], hint)
            assert found is not None
            assert np.array_equal(found, ids[row])
    assert grown.find(np.append(tokens[0], 1), 0) is None


def sequences_of(model: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, RoutingTrace]:
    """Right-padded sequences, their mask, and what a bfloat16 copy of the model chooses for them."""
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


def loss_and_gradients(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    model.zero_grad()
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    (log_probs * mask[:, 1:]).sum().backward()
    return logits.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_of_a_models_own_choice_changes_no_bit(model_type: str, dtype: torch.dtype) -> None:
    model = model_of(model_type, dtype)
    prompts, mask = left_padded()
    with record_routing(model) as record:
        expected = loss_and_gradients(model, prompts, mask)
    trace = record.trace(prompts, mask)
    with replay_routing(model, trace, mask):
        actual = loss_and_gradients(model, prompts, mask)
    assert torch.equal(actual[0], expected[0])
    assert equal(actual[1], expected[1])
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
            with ExitStack() as stack:
                for layer, router in enumerate(routers(model)):
                    stack.enter_context(chosen(router, ids_NLK[:, layer]))
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
        expected = loss_and_gradients(model, tokens, mask)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with record_routing(model) as record, choices(model) as seen, replay_routing(model, trace, mask):
        actual = loss_and_gradients(model, tokens, mask)
    assert [len(calls) for calls in seen] == [2] * trace.num_layers  # forward, and again in backward
    assert len(record._calls) == 1
    assert np.array_equal(record.trace(tokens, mask).expert_ids, trace.expert_ids)
    assert torch.equal(actual[0], expected[0])
    assert equal(actual[1], expected[1])
    with replay_routing(model, trace, mask):
        loss = model(input_ids=tokens, attention_mask=mask).logits.sum()
    with pytest.raises(RuntimeError, match=r"runs a layer again after replay_routing\(\) has ended"):
        loss.backward()
    with record_routing(model) as record:  # and without replay
        loss_and_gradients(model, tokens, mask)
    assert len(record._calls) == 1


def test_a_whole_model_that_is_checkpointed() -> None:
    model = model_of("deepseek_v3")
    tokens, mask, trace = sequences_of(model)
    with replay_routing(model, trace, mask):
        _, expected = loss_and_gradients(model, tokens, mask)
        model.zero_grad()
        with record_routing(model) as record:
            logits = checkpoint(
                lambda: model(input_ids=tokens, attention_mask=mask, use_cache=False).logits, use_reentrant=False
            )
            log_probs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            (log_probs * mask[:, 1:]).sum().backward()
    assert equal([p.grad for p in model.parameters()], expected)
    assert np.array_equal(record.trace(tokens, mask).expert_ids, trace.expert_ids)


def test_the_innermost_replay_counts() -> None:
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
        (RoutingTrace.from_sequences([x[:, :1] for x in ids], num_experts=8), mask, "the trace has 1 MoE layers"),
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
