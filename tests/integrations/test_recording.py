"""Recorded routing of every model family, compared with routers that are called directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Cache, DynamicCache

from helpers.moe_families import MODEL_TYPES, MOE_LAYERS, NUM_EXPERTS, TOP_K
from helpers.routers import PAD, PROMPTS, choices, fetched_calls, joined, left_padded, model_of, routers
from helpers.routers import one_thread as one_thread
from trimtab import InputError
from trimtab.integrations.transformers import record_routing, recording
from trimtab.trace import hash_tokens

END = 29


def until_end(response: list[int]) -> list[int]:
    return response[: response.index(END) + 1] if END in response else response


@contextmanager
def ending(model: Any, rows: list[int], place: int) -> Iterator[None]:
    """Let the model emit the end token in some rows once `place` tokens are in their cache, and never elsewhere."""

    def force(_model: Any, _args: Any, kwargs: Any, output: Any) -> None:
        output.logits[:, -1, END] = -1e9
        if kwargs.get("cache", kwargs.get("past_key_values")).get_seq_length() == place:
            output.logits[rows, -1, END] = 1e9

    handle = model.register_forward_hook(force, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_generation_is_recorded_without_left_padding_and_without_tokens_after_eos(model_type: str) -> None:
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
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert Cache.reorder_cache.__qualname__ == "Cache.reorder_cache"


def test_several_generations_are_distinguished_by_their_tokens() -> None:
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


def test_of_equal_sequences_the_latest_is_used() -> None:
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


def test_a_cache_that_grows_over_several_calls_is_one_sequence() -> None:
    model = model_of("gpt_oss")
    tokens = torch.randint(1, 15, (2, 12))
    with record_routing(model) as record, choices(model) as seen, torch.no_grad():
        cache = model(input_ids=tokens[:, :4], use_cache=True).cache
        model(input_ids=tokens[:, 4:7], past_key_values=cache)
        other = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :3].flip(0), past_key_values=other)  # another conversation in between
        for layer in seen:
            layer.pop()
        model(input_ids=tokens[:, 7:11], cache=cache)
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 2))
    turns = record.trace(tokens, torch.ones_like(tokens), prompt_lengths=[4, 20])
    assert turns.prompt_lengths.tolist() == [4, 11]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_tokens_rejected_by_speculation_are_not_recorded(model_type: str) -> None:
    model = model_of(model_type)
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 3, 1, 4]])
    with record_routing(model) as record, choices(model) as seen:
        tokens = model.generate(prompt, max_new_tokens=12, prompt_lookup_num_tokens=4, do_sample=False, eos_token_id=14)
    assert joined(seen, 1).shape[1] > tokens.shape[1] - 1  # some were taken back
    with choices(model) as plain, torch.no_grad():
        model(input_ids=tokens[:, :-1])
    assert np.array_equal(np.sort(record.expert_ids(tokens)), np.sort(joined(plain, 1)))


def test_a_static_cache_with_its_length_on_the_device_is_recorded() -> None:
    model = model_of("qwen3_moe")
    prompts, mask = left_padded()
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    with record_routing(model) as record, choices(model) as seen:
        tokens = model.generate(prompts, cache_implementation="static", **how)
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 3))


def test_rows_that_cant_be_identified_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    prompts, mask = left_padded()

    def refused(record: Any, tokens: torch.Tensor, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            record.trace(tokens, torch.ones_like(tokens))
        assert "\n" not in str(caught.value)

    beams = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "max_new_tokens": 4}
    with record_routing(model) as record:
        tokens = model.generate(prompts, attention_mask=mask, **beams)
        refused(record, tokens, "identified: beam search reorders the rows of its cache. Give tokens")
        tokens = model.generate(prompts, attention_mask=mask, use_cache=False, **beams)
        record.trace(tokens, mask.repeat_interleave(3, dim=0), eos_token_id=END).check()

    tokens = torch.randint(1, 15, (2, 9))
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :4], use_cache=True).cache
        with record_routing(model) as record:
            model(input_ids=tokens[:, 4:], past_key_values=cache)
        refused(record, tokens, "identified: 4 tokens were in the cache before recording began")
        with record_routing(model) as record:
            cache = model(input_ids=tokens[:, :4], use_cache=True).cache
            cache.batch_select_indices(torch.tensor([1]))
            model(input_ids=tokens[1:, 4:], past_key_values=cache)
        refused(record, tokens, "identified: a batch went from 2 to 1 rows during a sequence")
        with record_routing(model) as record:
            model(inputs_embeds=model.model.embed_tokens(tokens))
        refused(record, tokens, "identified: the model was fed embeddings instead of token ids")
        with record_routing(model) as record, monkeypatch.context() as patch:
            patch.setattr(model.config, "num_hidden_layers", 1)
            model(input_ids=tokens)
        refused(record, tokens, "identified: only 1 of 2 MoE layers ran")
        with record_routing(model) as record:
            model(input_ids=tokens)
        refused(record, tokens.flip(1), "sequence 0 was not recorded: no forward was fed its 8 tokens. Give tokens")
    for bad, message in (
        (torch.ones(2, 10), "the mask does not fit tokens of width 9"),
        (torch.tensor([[1, 1, 1], [1, 1, 0]]), "row 1 of the mask does not fit .* left-padded prompts"),
        (torch.tensor([[1, 0, 1], [1, 1, 1]]), "row 0 of the mask"),
        (torch.tensor([[0, 0, 0], [1, 1, 1]]), "row 0 of the mask"),
        (torch.tensor([[1] * 9, [1, 1, 1, 0, 0, 1, 1, 1, 1]]), "row 1 of the mask"),
        (torch.ones(1, 3), r"tokens have shape \(2, 9\) and the mask \(1, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            record.trace(tokens, bad)


def test_a_failed_forward_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with fetched_calls() as fetched:
        assert record.expert_ids(tokens).shape == (2, 5, 2, TOP_K)
    assert fetched == [1]


def test_blocks_of_ids_are_copied_to_the_host_during_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("glm4_moe")
    prompts, mask = left_padded()
    monkeypatch.setattr(recording, "BLOCK_BYTES", 50)  # three decode calls
    with record_routing(model) as record, choices(model) as seen, fetched_calls() as fetched:
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=12, do_sample=True, eos_token_id=None)
    assert fetched == [1, 3, 3, 3]
    assert np.array_equal(record.expert_ids(tokens), joined(seen, 3))


def test_ids_of_more_than_256_experts_are_recorded() -> None:
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
