"""A model of every family in a session equals the plain one; vanilla transformers loads its checkpoints."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers.equality import relative_error
from helpers.examples import nightly_except
from helpers.moe_families import (
    MODEL_TYPES,
    MOE_LAYERS,
    NUM_EXPERTS,
    TOP_K,
    all_chosen,
    any_model,
    chosen,
    random_model,
    router_of,
    small_config,
)
from helpers.random_plans import random_plan, random_schedule
from helpers.rank_tests import runs_on_ranks
from recipes.rl.batches import collate, token_log_probs
from recipes.rl.responses import Response
from recipes.rl.task import build_tokenizer, save_model
from trimtab import InputError, RoutingTrace, Workload
from trimtab.integrations.transformers import (
    SUPPORTED_MODEL_TYPES,
    distribute_experts,
    families,
    moe_blocks,
    num_experts,
    record_routing,
    replay_routing,
)
from trimtab.integrations.transformers.families import choose_experts, top_k
from trimtab.runtime import Session
from trimtab.trace import hash_tokens
from trimtab.trace.numbering import random_orders


@dataclass(frozen=True)
class Case:
    """One comparison of a shared model with the plain one.

    Attributes:
        changes: of the small config.
        trained: parts of names of the parameters that are trained.
    """

    model_type: str
    seed: int
    dtype: torch.dtype = torch.float64
    changes: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    autocast: bool = False
    trained: tuple[str, ...] = ("",)

    @property
    def rounds(self) -> bool:
        return self.autocast or self.dtype is torch.bfloat16


def without_norm(model_type: str) -> dict[str, Any]:
    """The change that turns normalisation of router weights off, in families that can."""
    return {"norm_topk_prob": False} if hasattr(small_config(model_type), "norm_topk_prob") else {}


def copy_of(model: Any, dtype: torch.dtype) -> Any:
    """A copy with the same values and the same frozen parameters."""
    copy: Any = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    copy.load_state_dict(model.state_dict())
    for theirs, ours in zip(copy.parameters(), model.parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)
    return copy


def roll_out(model: Any, rng: np.random.Generator, count: int) -> list[Response]:
    """Random sequences of different lengths, with the routing that a bfloat16 copy of the model chooses."""
    copy = copy_of(model, torch.bfloat16).eval()
    sequences = []
    for _ in range(count):
        tokens = rng.integers(1, 15, int(rng.integers(4, 14)))
        with record_routing(copy) as record, torch.no_grad():
            copy(input_ids=torch.from_numpy(tokens[None, :-1]))
        ids, unused = record.expert_ids(tokens[None])[0], np.zeros(len(tokens) - 2, np.float32)
        sequences.append(Response(tokens, 2, ids, unused, advantage=float(rng.uniform(0.5, 1.5))))
    return sequences


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    log_probs = token_log_probs(model(input_ids=batch.input_ids, use_cache=False).logits, batch.targets)
    return (log_probs * batch.response_mask * batch.advantages).sum()


@pytest.mark.parametrize("model_type", nightly_except(MODEL_TYPES, "qwen3_moe", "gpt_oss"))
@runs_on_ranks()
def test_a_shared_model_equals_the_plain_one(model_type: str) -> None:
    # Where a limit clamps, gradients jump and rounding falls on either side: there take the published one.
    limit = {"swiglu_limit": 7.0} if model_type == "gpt_oss" else {}
    for case in (
        Case(model_type, seed=0),
        Case(model_type, seed=1, changes=without_norm(model_type), checkpointing=True),
        Case(model_type, seed=2, trained=(".self_attn.",)),
        Case(model_type, seed=5, trained=(".gate.", ".router.")),
        Case(model_type, seed=3, changes=limit, dtype=torch.bfloat16),
        Case(model_type, seed=4, changes=limit, dtype=torch.float32, autocast=True),
    ):
        compare_with_plain_model(case)


@runs_on_ranks()
def test_data_parallelism_of_the_dense_part_leaves_experts_alone() -> None:
    """Neither its broadcast nor its sums reach them."""
    torch.manual_seed(0)
    plain = random_model(small_config("qwen3_moe"), torch.float64)
    shared = copy_of(plain, torch.float64)
    session = Session(num_experts=num_experts(shared.config))
    distribute_experts(shared, session)
    wrapped = DistributedDataParallel(shared)
    tokens = torch.arange(1, 13)[None] + dist.get_rank()
    wrapped(input_ids=tokens, use_cache=False).logits.square().sum().backward()
    both = torch.cat([tokens - dist.get_rank(), tokens - dist.get_rank() + 1])
    plain(input_ids=both, use_cache=False).logits.square().sum().backward()
    home = torch.from_numpy(session.home_experts)
    experts = {id(parameter) for layer in session.homes for parameter in layer.parameters}
    for (name, mine), whole in zip(shared.named_parameters(), plain.parameters(), strict=True):
        is_expert = id(mine) in experts
        # It averages, and experts get the sum over all ranks' tokens.
        expected = whole.grad[home] if is_expert else whole.grad / 2
        assert relative_error(mine.grad, expected) < 1e-12, name


def compare_with_plain_model(case: Case) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    rng = np.random.default_rng(case.seed)
    torch.manual_seed(case.seed)
    plain = random_model(small_config(case.model_type, **case.changes), case.dtype)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(any(part in name for part in case.trained))
    shared = copy_of(plain, case.dtype)
    session = Session(num_experts=num_experts(shared.config), slots_per_rank=2)
    distribute_experts(shared, session, compute_dtype=torch.bfloat16 if case.autocast else None)
    if case.checkpointing:
        shared.gradient_checkpointing_enable({"use_reentrant": False})
    shared.train()
    sequences = roll_out(plain, rng, 6)
    layers = MOE_LAYERS[case.model_type]
    trace = RoutingTrace.from_sequences(
        [sequence.expert_ids for sequence in sequences], num_experts=NUM_EXPERTS, shape=(len(layers), TOP_K),
        layer_indices=np.array(layers, np.int32), prompt_lengths=[2] * len(sequences), model=case.model_type,
        sequence_hashes=[hash_tokens(sequence.token_ids) for sequence in sequences],
    )  # fmt: skip
    schedule = random_schedule(rng, 6, num_ranks=session.num_ranks, num_micro_steps=2)
    workload = Workload.from_trace(trace, schedule)
    plan = random_plan(rng, workload, schedule, slots=2)
    assert plan.num_replicas > 0, case
    session.apply_step_plan(plan, trace.select(schedule.sequences_of(session.rank)))

    # Norms, router probabilities and log-probabilities are float32 in the models and in the trainer.
    tolerance = 1e-5
    if case.rounds:
        rough, plain = plain, copy_of(plain, torch.float32)
        replayed_loss(rough, sequences, autocast=case.autocast).backward()
    expected = replayed_loss(plain, sequences)
    expected.backward()
    if case.rounds:
        tolerance = 2 * max(map(gradient_error, rough.parameters(), plain.parameters()))

    loss = torch.zeros(())
    for index in range(2):
        mine = np.flatnonzero((schedule.rank == session.rank) & (schedule.micro_step == index))
        batch = collate([sequences[s] for s in mine], pad_token_id=0, device=cpu)
        with session.micro_step(index, positions=batch.positions, sequence_hashes=batch.sequence_hashes):
            with record_routing(shared) as record, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                part = loss_of(shared, batch)
            part.backward()
        loss += part.detach()
        check_replayed(record, batch, [sequences[s] for s in mine])
    session.finish_gradients(session.replicated_parameters(shared))
    torch.distributed.all_reduce(loss)
    assert relative_error(loss, expected.detach()) < min(tolerance, 1e-2), case
    home = torch.from_numpy(session.home_experts)
    for (name, actual), (_, wanted) in zip(shared.named_parameters(), plain.named_parameters(), strict=True):
        assert (actual.grad is None) == (wanted.grad is None), (case, name)
        part_of = home if ".mlp.experts." in name else slice(None)
        assert gradient_error(actual, wanted, part_of) < tolerance, (case, name)
    assert session.counters.unplanned_micro_steps == 0


def gradient_error(actual: nn.Parameter, wanted: nn.Parameter, part_of: Any = slice(None)) -> float:
    if actual.grad is None or wanted.grad is None:
        return 0.0
    return relative_error(actual.grad, wanted.grad[part_of])


def replayed_loss(model: Any, sequences: list[Response], *, autocast: bool = False) -> torch.Tensor:
    """A plain model's loss, sequence by sequence, with the recorded experts and without the adapter."""
    loss = torch.zeros(())
    for sequence in sequences:
        ids_NLK = torch.from_numpy(sequence.expert_ids.astype(np.int64))
        with all_chosen(model, ids_NLK), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss + loss_of(model, collate([sequence], pad_token_id=0, device=torch.device("cpu")))
    return loss


def check_replayed(record: Any, batch: Any, sequences: list[Response]) -> None:
    """The sets of experts used in training are those recorded, token by token."""
    ids_BTLK = record.expert_ids(torch.cat([batch.input_ids, batch.targets[:, -1:]], dim=1))
    for row, sequence in enumerate(sequences):
        actual = np.sort(ids_BTLK[row, : sequence.num_fed], axis=-1)
        assert np.array_equal(actual, np.sort(sequence.expert_ids, axis=-1))


def kept(seen: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    seen.append(ids)
    return ids


def instead(others: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return others


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_experts_have_the_weights_of_the_routers_own(model_type: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for changes in ({}, without_norm(model_type)):
        config = small_config(model_type, **changes)
        router = router_of(moe_blocks(random_model(config, dtype))[MOE_LAYERS[model_type][0]])
        hidden, others = torch.randn(40, 32, dtype=dtype), torch.rand(40, NUM_EXPERTS).argsort(dim=-1)[:, :TOP_K]
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                wanted = router(hidden)
                seen: list[torch.Tensor] = []
                restore = choose_experts(router, config, partial(kept, seen))
                assert all(map(torch.equal, router(hidden), wanted))
                assert torch.equal(seen[0], wanted[2])
                restore()
                with chosen(router, others):
                    of_others = router(hidden)
                restore = choose_experts(router, config, partial(instead, others))
                assert all(map(torch.equal, router(hidden), of_others))
                restore()
                assert not torch.equal(wanted[1], of_others[1])
                assert "forward" not in vars(router)


@pytest.mark.parametrize(
    "model_type", nightly_except([each for each in SUPPORTED_MODEL_TYPES if each not in MODEL_TYPES], "olmoe")
)
@runs_on_ranks(1)
def test_other_families_of_the_same_form_equal_transformers(model_type: str) -> None:
    """Without a plan, and with replayed random routes."""
    torch.manual_seed(0)
    model = any_model(model_type)
    plain, tokens = copy.deepcopy(model), torch.arange(1, 15).view(2, 7)
    session = Session(num_experts=num_experts(model.config))
    distribute_experts(model, session)
    assert (session.num_experts, top_k(model.config)) == (NUM_EXPERTS, TOP_K)
    blocks = moe_blocks(plain)
    ids = np.argsort(np.random.default_rng(0).random((tokens.numel(), len(blocks), NUM_EXPERTS)))[..., :TOP_K]
    session.plan_micro_steps([ids])

    def run(model: Any) -> torch.Tensor:
        output = model(input_ids=tokens, use_cache=False)
        found = output.logits if hasattr(output, "logits") else output.last_hidden_state
        (found * torch.linspace(-1, 1, found.shape[-1])).sum().backward()
        result: torch.Tensor = found.detach()
        return result

    for replays in (False, True):
        with ExitStack() as stack:
            for layer, block in enumerate(blocks.values() if replays else ()):
                stack.enter_context(chosen(families.router_of(block), torch.from_numpy(ids[:, layer].copy())))
            wanted = run(plain)
        with session.micro_step(0) if replays else nullcontext():
            found = run(model)
        assert relative_error(found, wanted) < 1e-5
    session.finish_gradients()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad.norm() > 1e-6:
            assert relative_error(one.grad, other.grad) < 1e-3, name
    session.close()


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("phimoe", "PhimoeTopKRouter does not return"),
        ("llama4_text", "Llama4TextExperts"),
        ("longcat_flash", "Longcat"),
    ],
)
@runs_on_ranks(1)
def test_families_of_another_form_are_refused_by_name(model_type: str, message: str) -> None:
    model = any_model(model_type)

    def run() -> None:
        distribute_experts(model, Session(num_experts=NUM_EXPERTS))
        model(input_ids=torch.arange(1, 9)[None])

    with pytest.raises(InputError, match=message):
        run()


class ReorderingRouter(nn.Module):
    """Returns other ids than those of its top-k, so that a session would not know its rows."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, ids = hidden[:, :NUM_EXPERTS].topk(TOP_K)
        return hidden, weights.flip(-1), ids.flip(-1)


def test_a_router_that_changes_its_choice_is_refused() -> None:
    router = ReorderingRouter()
    restore = choose_experts(
        router, small_config("qwen3_moe"), partial(instead, torch.zeros(4, TOP_K, dtype=torch.int64))
    )
    with pytest.raises(InputError, match="ReorderingRouter does not return"):
        router(torch.randn(4, 32))
    restore()
    router(torch.randn(4, 32))


def test_experts_of_other_groups_have_their_weights() -> None:
    """DeepSeek-V2 masks the scores of other groups, and takes weights from what is left."""
    torch.manual_seed(0)
    model = any_model("deepseek_v2")
    router: Any = families.router_of(next(iter(moe_blocks(model).values())))
    router.topk_method, router.num_group, router.topk_group = "group_limited_greedy", 4, 1
    hidden, others = torch.randn(40, 32), torch.rand(40, NUM_EXPERTS).argsort(dim=-1)[:, :TOP_K]
    choose_experts(router, model.config, partial(instead, others))
    logits, weights, ids = router(hidden)
    assert torch.equal(ids, others)
    assert torch.equal(weights, logits.softmax(dim=-1).gather(1, others) * router.routed_scaling_factor)


def test_a_copy_of_a_model_keeps_its_own_router() -> None:
    model = random_model(small_config("qwen3_moe"), torch.float32)
    router = router_of(moe_blocks(model)[0])
    choose_experts(router, model.config, lambda ids: ids)
    other = router_of(moe_blocks(copy.deepcopy(model))[0])
    with torch.no_grad():
        other.weight.neg_()
    hidden = torch.randn(4, 32)
    assert torch.equal(other(hidden)[0], -router(hidden)[0])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@runs_on_ranks()
def test_vanilla_transformers_loads_a_checkpoint(model_type: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(3)
    config = small_config(model_type, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model, tokens = random_model(config, torch.float32), torch.arange(12).reshape(2, 6)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    session = Session(num_experts=NUM_EXPERTS)
    distribute_experts(model, session)
    groups = getattr(config, "n_group", None) or 1
    for folder in ("as it was", "renumbered"):
        if folder == "renumbered":
            if groups > 1:
                with pytest.raises(InputError, match="splits a group"):
                    session.renumber(np.roll(random_orders(len(session.layers), NUM_EXPERTS, 1, groups), 1, axis=1))
            session.register_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
            session.renumber(random_orders(len(session.layers), NUM_EXPERTS, 1, groups))
        state = session.whole_state_dict(model)
        if session.rank == 0:
            save_model(config, state, tokenizer, tmp_path / folder)
        torch.distributed.barrier()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, experts_implementation="eager"
        )
        state = loaded.state_dict()
        assert list(state) == list(plain)
        same = all(torch.equal(value, state[name]) for name, value in plain.items())
        assert same == (folder == "as it was")
        with torch.no_grad():
            # Sums of float32 in another order.
            assert torch.allclose(loaded(input_ids=tokens).logits, logits, atol=1e-5)


class Wrapper(nn.Module):
    """A module around a model with the model's config, as in adapter libraries."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_blocks_are_found_in_whole_models_decoders_and_wrappers(model_type: str) -> None:
    model: Any = AutoModelForCausalLM.from_config(small_config(model_type))
    blocks = {layer: model.model.layers[layer].mlp for layer in MOE_LAYERS[model_type]}
    for whole in (model, model.model, Wrapper(Wrapper(model))):
        assert moe_blocks(whole) == blocks
    assert num_experts(model.config) == NUM_EXPERTS
    assert set(MODEL_TYPES) < set(SUPPORTED_MODEL_TYPES)


def test_other_model_types_are_refused_by_name() -> None:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8)
    with pytest.raises(InputError, match="this llama model has no MoE layer"):
        moe_blocks(LlamaForCausalLM(config))
    dense = AutoModelForCausalLM.from_config(small_config("qwen3_moe", mlp_only_layers=[0, 1, 2]))
    with pytest.raises(InputError, match="this qwen3_moe model has no MoE layer"):
        moe_blocks(dense)


class LowRank(nn.Module):
    """Adds a low-rank update to the experts' down projections, as a parametrization."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(weight.new_zeros(len(weight), weight.shape[1], 2))
        self.b = nn.Parameter(weight.new_zeros(len(weight), 2, weight.shape[2]))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


class AdaptedExperts(nn.Module):
    """A module that adds its own output to that of experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.base_layer = experts
        self.lora_a = nn.Parameter(torch.zeros(32, 2))


@runs_on_ranks()
def test_adapted_and_shared_experts_are_refused_by_name() -> None:
    config = small_config("gpt_oss")
    session = Session(num_experts=NUM_EXPERTS)

    def refused(model: Any, session: Session, message: str) -> None:
        before = {name: tensor.shape for name, tensor in model.state_dict().items()}
        with pytest.raises(InputError, match=message) as caught:
            distribute_experts(model, session)
        assert "\n" not in str(caught.value)
        assert {name: tensor.shape for name, tensor in model.state_dict().items()} == before
        assert not session.layers

    parametrized: Any = AutoModelForCausalLM.from_config(config)
    experts = parametrized.model.layers[1].mlp.experts
    parametrize.register_parametrization(experts, "down_proj", LowRank(experts.down_proj))
    refused(parametrized, session, r"layer 1: Parametrized.* hold .*down_proj.0.a.* needs plain .*merge adapters")
    wrapped: Any = AutoModelForCausalLM.from_config(config)
    wrapped.model.layers[2].mlp.experts = AdaptedExperts(wrapped.model.layers[2].mlp.experts)
    refused(wrapped, session, "decoder layer 2: AdaptedExperts .* without adapters")

    model: Any = AutoModelForCausalLM.from_config(config)
    refused(model, Session(num_experts=4), "layer 0 .* hold 8 in gate_up_proj and the session is for 4")
    distribute_experts(model, session)
    refused(model, Session(num_experts=NUM_EXPERTS), "hold 4 in gate_up_proj and the session is for 8; .* no session")
    ids = np.tile(np.arange(TOP_K), (4, len(MOE_LAYERS["gpt_oss"]), 1))
    trace = RoutingTrace.from_sequences([ids], num_experts=NUM_EXPERTS)
    with pytest.raises(InputError, match="in a session, which replays"), replay_routing(model, trace, torch.ones(1, 4)):
        pass
