"""A Qwen3-MoE in a session equals the plain model; what it saves, vanilla transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from helpers.equality import relative_error
from helpers.random_plans import random_plan, random_schedule
from trimtab import InputError, RoutingTrace, Workload
from trimtab.integrations.transformers import moe_blocks, record_routing, replicated_parameters, share_experts
from trimtab.rl.batches import collate
from trimtab.rl.losses import token_log_probs
from trimtab.rl.model import save_checkpoint
from trimtab.rl.sequences import Sequence, routing_of
from trimtab.rl.task import build_tokenizer
from trimtab.runtime import Session
from trimtab.runtime.launch import launch


def small_config(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 15,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def roll_out(model: Any, rng: np.random.Generator, count: int) -> list[Sequence]:
    """Random sequences of different lengths with the routing that a bfloat16 copy of the model chooses for them."""
    copy: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    copy.load_state_dict(model.state_dict())
    sequences = []
    for _ in range(count):
        tokens = rng.integers(1, 15, int(rng.integers(4, 14)))
        with record_routing(copy) as record, torch.no_grad():
            copy(input_ids=torch.from_numpy(tokens[None, :-1]))
        sequences.append(Sequence(tokens, 2, record.by_sequence(1)[0], 0.0, float(rng.uniform(0.5, 1.5))))
    return sequences


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    log_probs = token_log_probs(model(input_ids=batch.input_ids, use_cache=False).logits, batch.targets)
    return (log_probs * batch.response_mask * batch.advantages).sum()


def compare_with_plain_model(seeds: list[int], norm_topk_prob: bool) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    for seed in seeds:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        config = small_config(norm_topk_prob=norm_topk_prob)
        # transformers' grouped matrix products don't take float64.
        plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
        shared: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        shared.load_state_dict(plain.state_dict())
        session = Session(num_experts=8, slots_per_rank=2)
        share_experts(shared, session)
        if seed % 2:
            shared.gradient_checkpointing_enable({"use_reentrant": False})
        shared.train()
        sequences = roll_out(plain, rng, 6)
        layer_indices = np.array([0, 2], np.int32)
        trace = routing_of(sequences, num_experts=8, shape=(2, 3), layer_indices=layer_indices, step=0, model="test")
        schedule = random_schedule(rng, 6, num_ranks=session.num_ranks, num_micro_steps=2)
        workload = Workload.from_trace(trace, schedule)
        session.adopt(random_plan(rng, workload, schedule, slots=2), trace.select(schedule.sequences_of(session.rank)))

        expected = torch.zeros((), dtype=torch.float64)
        for sequence in sequences:
            hooks = replay_plainly(plain, sequence.expert_ids)
            expected = expected + loss_of(plain, collate([sequence], pad_token_id=0, device=cpu))
            for hook in hooks:
                hook.remove()
        expected.backward()

        loss = torch.zeros((), dtype=torch.float64)
        for index in range(2):
            mine = np.flatnonzero((schedule.rank == session.rank) & (schedule.micro_step == index))
            batch = collate([sequences[s] for s in mine], pad_token_id=0, device=cpu)
            with session.micro_step(index, positions=batch.positions, sequence_hashes=batch.sequence_hashes):
                with record_routing(shared) as record:
                    part = loss_of(shared, batch)
                part.backward()
            loss += part.detach()
            check_replayed(record, batch, [sequences[s] for s in mine])
        session.finish_gradients(replicated_parameters(shared, session))
        torch.distributed.all_reduce(loss)
        # Norms, router probabilities and log-probabilities are float32 in the model and in the trainer.
        assert relative_error(loss, expected.detach()) < 1e-5, seed
        home = torch.from_numpy(session.home_experts)
        for (name, actual), (_, wanted) in zip(shared.named_parameters(), plain.named_parameters(), strict=True):
            gradient = wanted.grad[home] if ".experts." in name else wanted.grad
            assert relative_error(actual.grad, gradient) < 1e-5, (seed, name)
        assert session.unplanned_micro_steps == 0


def replay_plainly(model: Any, expert_ids: Any) -> list[Any]:
    """Make a plain model use recorded experts, written without the adapter."""
    hooks = []
    for layer, block in enumerate(moe_blocks(model).values()):
        ids = torch.from_numpy(expert_ids[:, layer].astype(np.int64))

        def give(gate: Any, _args: Any, output: Any, ids: torch.Tensor = ids) -> Any:
            probabilities = torch.softmax(output[0].float(), dim=-1)
            weights = torch.stack([probabilities[token, row] for token, row in enumerate(ids)])
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return output[0], weights.to(output[0].dtype), ids

        hooks.append(block.gate.register_forward_hook(give))
    return hooks


def check_replayed(record: Any, batch: Any, sequences: list[Sequence]) -> None:
    """The sets of experts used in training are those recorded, token by token."""
    ids_BTLK = record.by_sequence(len(batch.input_ids))
    for row, sequence in enumerate(sequences):
        actual = np.sort(ids_BTLK[row, : sequence.num_fed], axis=-1)
        assert np.array_equal(actual, np.sort(sequence.expert_ids, axis=-1))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_a_shared_qwen3_moe_equals_the_plain_one(norm_topk_prob: bool) -> None:
    launch(compare_with_plain_model, ([0, 1, 2, 3], norm_topk_prob), ranks=2)


def save_from_ranks(out: Path) -> None:
    torch.manual_seed(3)
    tokenizer = build_tokenizer()
    config = small_config(vocab_size=len(tokenizer))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if torch.distributed.get_rank() == 0:
        torch.save(model.state_dict(), out / "plain.pt")
    session = Session(num_experts=8)
    share_experts(model, session)
    state = session.logical_state_dict(model)
    if torch.distributed.get_rank() == 0:
        save_checkpoint(config, state, tokenizer, out / "checkpoint")
    torch.distributed.barrier()


def test_vanilla_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    launch(save_from_ranks, (tmp_path,), ranks=2)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    state = loaded.state_dict()
    for name, tensor in torch.load(tmp_path / "plain.pt").items():
        assert torch.equal(tensor, state[name]), name


def test_recording_ends_with_its_context() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(small_config(), dtype=torch.float32).eval()
    with record_routing(model) as record, torch.no_grad():
        model.generate(torch.ones(2, 4, dtype=torch.int64), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert record.by_sequence(2).shape == (2, 4 + 2, 2, 3)
    assert not any(block.gate._forward_hooks for block in moe_blocks(model).values())
    RoutingTrace.from_sequences(list(record.by_sequence(2)), num_experts=8).check()


def test_other_models_are_refused_by_name() -> None:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8)
    with pytest.raises(InputError, match="model type 'llama' is not supported; use one of qwen3_moe"):
        moe_blocks(LlamaForCausalLM(config))
