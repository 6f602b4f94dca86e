"""A model in transformers' own expert parallelism and a session equals the same model with "all_to_all"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.integrations.accelerate as loading
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from helpers.equality import relative_error
from helpers.live_runs import quotas_of_few
from helpers.moe_families import MODEL_TYPES, MOE_LAYERS, NUM_EXPERTS, TOP_K, random_model, small_config
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_pool import on_ranks
from trimtab import InputError, RoutingTrace, Workload
from trimtab.integrations.expert_parallel import register, use_session
from trimtab.integrations.transformers import moe_blocks, router_weights
from trimtab.integrations.transformers.families import family_of
from trimtab.planner import Placement, Schedule
from trimtab.runtime import Session
from trimtab.runtime.live import balancer
from trimtab.runtime.live.policies import LivePolicy

VOCAB = 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved random models of every family, for `from_pretrained`."""
    path = tmp_path_factory.mktemp("models")
    for seed, family in enumerate(MODEL_TYPES):
        torch.manual_seed(seed)
        random_model(small_config(family), torch.float32).save_pretrained(path / family)
    return path


def load(
    saved: Path,
    implementation: str = "trimtab",
    family: str = "qwen3_moe",
    dtype: torch.dtype = torch.float32,
    experts: str | None = None,
    **sizes: Any,
) -> Any:
    """A model in expert parallelism over all ranks."""
    # Loading asks whether accelerate is there, although it does not need it for this.
    loading.is_accelerate_available = lambda *_: True
    ranks = dist.get_world_size()
    config = DistributedConfig(**({"fsdp_size": ranks, "ep_size": ranks} | sizes), ep_implementation=implementation)
    if dtype is torch.float64:
        # transformers' grouped matrix products don't take it.
        experts = "eager"
    model: Any = AutoModelForCausalLM.from_pretrained(
        saved / family, dtype=dtype, experts_implementation=experts, distributed_config=config
    )
    return model.train()


@dataclass(frozen=True, eq=False)
class Step:
    """Sequences of all ranks, their schedule, and the routing that is replayed."""

    trace: RoutingTrace
    tokens: torch.Tensor
    labels: torch.Tensor
    schedule: Schedule

    @classmethod
    def random(cls, rng: np.random.Generator, micro_steps: int, moe_layers: int = 2) -> Step:
        trace = random_trace(
            rng, num_sequences=7, max_length=9, num_layers=moe_layers, num_experts=NUM_EXPERTS, top_k=TOP_K
        )
        tokens, labels = (torch.from_numpy(rng.integers(0, VOCAB, trace.num_tokens)) for _ in range(2))
        return cls(trace, tokens, labels, random_schedule(rng, 7, num_ranks=2, num_micro_steps=micro_steps))

    def apply(self, rng: np.random.Generator, session: Session) -> int:
        """Give the session a random plan. Returns how many replicas it has."""
        workload = Workload.from_trace(self.trace, self.schedule)
        per_node = session.topology.ranks_per_node
        plan = random_plan(rng, workload, self.schedule, slots=session.slots_per_rank, ranks_per_node=per_node)
        session.apply_step_plan(plan, self.trace.select(self.schedule.sequences_of(session.rank)))
        return plan.num_replicas

    def batch(self, micro_step: int, rank: int) -> Batch:
        mine = np.flatnonzero((self.schedule.rank == rank) & (self.schedule.micro_step == micro_step))
        return Batch.of(self, mine)

    def all_sequences(self) -> Batch:
        return Batch.of(self, np.arange(self.trace.num_sequences))


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences padded on the right, with at least one row and a token of padding."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    ids_LNK: torch.Tensor
    hashes: Any

    @classmethod
    def of(cls, step: Step, sequences: Any) -> Batch:
        trace = step.trace
        rows = [np.arange(trace.sequence_starts[s], trace.sequence_starts[s + 1]) for s in sequences]
        width = max((len(part) for part in rows), default=0) + 1
        positions = torch.from_numpy(
            np.concatenate([*(i * width + np.arange(len(part)) for i, part in enumerate(rows)), np.empty(0, np.int64)])
        )
        picked = np.concatenate([*rows, np.empty(0, np.int64)])
        input_ids = torch.zeros(max(1, len(rows)) * width, dtype=torch.int64)
        input_ids[positions] = step.tokens[picked]
        ids_LNK = torch.from_numpy(trace.expert_ids[picked].transpose(1, 0, 2).astype(np.int64))
        hashes = trace.sequence_hashes[sequences]
        return cls(input_ids.view(-1, width), positions, step.labels[picked], ids_LNK, hashes)

    def loss(self, model: Any) -> torch.Tensor:
        logits = model(input_ids=self.input_ids, use_cache=False).logits.flatten(0, 1)[self.positions]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, self.labels, reduction="sum") / 20


@contextmanager
def replayed(model: Any, batch: Batch) -> Iterator[None]:
    """Make a model without a session use the recorded experts."""

    def give(layer: int) -> Callable[..., Any]:
        def hook(_gate: nn.Module, _args: Any, output: Any) -> Any:
            logits, _, live = output
            ids = live.clone()
            ids[batch.positions] = batch.ids_LNK[layer]
            return logits, router_weights(model.config, logits, ids), ids

        return hook

    routers = [getattr(block, family_of(model.config).router) for block in moe_blocks(model).values()]
    hooks = [router.register_forward_hook(give(layer)) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_gradients(actual: Any, expected: Any, tolerance: float, case: object) -> None:
    """Compare gradients, sharded in the same way or expected ones whole; expected losses are summed over ranks."""
    for (name, one), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        if hasattr(other.grad, "to_local"):
            error = relative_error(one.grad.to_local(), other.grad.to_local())
        else:
            error = relative_error(one.grad.full_tensor(), other.grad / dist.get_world_size())
        assert error < tolerance, (case, name, error)


@dataclass(frozen=True)
class Case:
    seed: int
    sync_always: bool
    checkpointing: str
    family: str = "qwen3_moe"
    dtype: torch.dtype = torch.float32


def make_pair(saved: Path, rng: np.random.Generator, ranks_per_node: int, **sizes: Any) -> tuple[Any, Any, Session]:
    """The model with "all_to_all", and the same model in a session."""
    register()
    torch.set_num_threads(1)
    expected, actual = load(saved, "all_to_all", **sizes), load(saved, **sizes)
    slots, layers = int(rng.integers(1, 4)), int(rng.integers(2, 4))
    session = Session(num_experts=NUM_EXPERTS, slots_per_rank=slots, ring_layers=layers, ranks_per_node=ranks_per_node)
    use_session(actual, session)
    return expected, actual, session


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train_both(saved: Path, cases: list[Case]) -> None:
    """Compare losses, gradients and weights over optimizer steps with random plans."""
    for case in cases:
        rng = np.random.default_rng(case.seed)
        plain: Any = AutoModelForCausalLM.from_pretrained(
            saved / case.family, dtype=case.dtype, experts_implementation="eager"
        )
        expected, actual, session = make_pair(
            saved, rng, ranks_per_node=1 + case.seed % 2, family=case.family, dtype=case.dtype
        )
        if case.checkpointing != "none":
            actual.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
        optimizers = [optimizer_of(model) for model in (expected, actual)]
        replicas = 0
        for step_index in range(2):
            step = Step.random(rng, micro_steps=3, moe_layers=len(MOE_LAYERS[case.family]))
            replicas += step.apply(rng, session)
            recomputed = {}
            for index in rng.permutation(3):
                batch = step.batch(int(index), session.rank)
                with torch.no_grad(), session.micro_step(int(index), positions=batch.positions):
                    recomputed[index] = batch.loss(actual)
            order = rng.permutation(3)
            for index in order:
                batch = step.batch(int(index), session.rank)
                for model in (expected, actual):
                    model.set_requires_gradient_sync(case.sync_always or index == order[-1])
                with replayed(expected, batch):
                    wanted = batch.loss(expected)
                    wanted.backward()
                with session.micro_step(int(index), positions=batch.positions, sequence_hashes=batch.hashes):
                    loss = batch.loss(actual)
                    loss.backward()
                assert relative_error(loss, wanted) < 1e-5, (case, step_index)
                assert relative_error(recomputed[index], wanted) < 1e-5, (case, step_index)
            session.finish_gradients()
            check_gradients(actual, expected, 1e-5, (case, step_index))
            if step_index == 0 and case.dtype is torch.float32:
                # Of float64, FSDP2 divides gradients twice where one rank has all of a parameter.
                whole = step.all_sequences()
                with replayed(plain, whole):
                    whole.loss(plain).backward()
                check_gradients(actual, plain, 1e-5, (case, "one process"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert replicas > 10, case
        assert session.take_metrics()["transfer/gradient_bytes"] > 0, case
        assert session.counters.unplanned_micro_steps == 0, case
        session.close()


def test_random_plans_equal_all_to_all(saved: Path) -> None:
    """In recompute and update, over optimizer steps, with gradients reduced after every micro-step or once."""
    cases = [Case(0, True, "none"), Case(1, False, "none"), Case(2, False, "plain"), Case(3, True, "reentrant")]
    # In float32, rounding can push activations over a limit that GPT-OSS has for them.
    families = [Case(4 + seed, False, "none", family, torch.float64) for seed, family in enumerate(MODEL_TYPES[1:])]
    on_ranks(train_both, (saved, cases + families), ranks=2)


def train_in_mixed_precision(saved: Path) -> None:
    rng = np.random.default_rng(4)
    expected, actual, session = make_pair(saved, rng, ranks_per_node=2, fsdp_mixed_precision=True)
    optimizers = [optimizer_of(model) for model in (expected, actual)]
    for step_index in range(2):
        step = Step.random(rng, micro_steps=1)
        step.apply(rng, session)
        batch = step.batch(0, session.rank)
        with replayed(expected, batch):
            batch.loss(expected).backward()
        with session.micro_step(0, positions=batch.positions):
            for layer, block in zip(session.layers, moe_blocks(actual).values(), strict=True):
                for source, name in zip(layer.homes.sources, ("gate_up_proj", "down_proj"), strict=True):
                    assert isinstance(source, torch.Tensor)
                    assert torch.equal(source, getattr(block.experts, name).to_local().bfloat16())
            batch.loss(actual).backward()
        session.finish_gradients()
        check_gradients(actual, expected, 0.1, step_index)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert session.take_metrics()["transfer/gradient_bytes"] > 0


def test_bfloat16_compute_with_float32_weights_equals_all_to_all(saved: Path) -> None:
    on_ranks(train_in_mixed_precision, (saved,), ranks=2)


def run_without_a_plan(saved: Path) -> None:
    """Run before there is a session, outside of micro-steps, and with other sequences than the planned ones."""
    rng = np.random.default_rng(5)
    register()
    step = Step.random(rng, micro_steps=1)
    expected, actual = load(saved, "all_to_all"), load(saved)
    batch = step.batch(0, dist.get_rank())
    assert torch.equal(batch.loss(actual), batch.loss(expected))
    session = Session(num_experts=NUM_EXPERTS)
    use_session(actual, session)
    step.apply(rng, session)
    # One rank's batch is another one, which unplans the micro-step on all.
    hashes = batch.hashes + dist.get_rank()
    for context, unplanned in ((nullcontext(), 0), (session.micro_step(0, sequence_hashes=hashes), 1)):
        wanted = batch.loss(expected)
        wanted.backward()
        with context:
            loss = batch.loss(actual)
            loss.backward()
        session.finish_gradients()
        assert relative_error(loss, wanted) < 1e-5
        check_gradients(actual, expected, 1e-5, unplanned)
        assert session.counters.unplanned_micro_steps == unplanned
    assert session.take_metrics()["transfer/gradient_bytes"] == 0


def test_without_a_plan_results_are_those_of_all_to_all(saved: Path) -> None:
    on_ranks(run_without_a_plan, (saved,), ranks=2)


def train_live(saved: Path, policies: tuple[LivePolicy, ...]) -> None:
    """Rows of padding go to experts with "all_to_all" and not in the session; no token depends on them."""
    register()
    torch.set_num_threads(1)
    for seed, policy in enumerate(policies):
        rng = np.random.default_rng((20, seed))
        expected, actual = load(saved, "all_to_all"), load(saved)
        session = Session(num_experts=NUM_EXPERTS, mode="live", policy=policy)
        use_session(actual, session)
        actual.gradient_checkpointing_enable({"use_reentrant": seed % 2 == 0})
        optimizers = [optimizer_of(model) for model in (expected, actual)]
        for step_index in range(2):
            step = Step.random(rng, micro_steps=2)
            for index in range(2):
                batch = step.batch(index, session.rank)
                for model in (expected, actual):
                    model.set_requires_gradient_sync(index == 1)
                wanted = batch.loss(expected)
                wanted.backward()
                with session.live_micro_step(positions=batch.positions):
                    loss = batch.loss(actual)
                loss.backward()
                assert relative_error(loss, wanted) < 1e-5, (policy, step_index)
            session.finish_gradients()
            check_gradients(actual, expected, 1e-5, (policy, step_index))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        metrics = session.take_metrics()
        assert metrics["live/replicas"] > 0, policy
        assert metrics["transfer/gradient_bytes"] > 0, policy
        session.close()


def train_live_with_few_tokens(saved: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancer, "choose_quotas", quotas_of_few)
        train_live(saved, ("quota", "feplb", "predict"))


def test_live_micro_steps_equal_all_to_all(saved: Path) -> None:
    on_ranks(train_live_with_few_tokens, (saved,), ranks=2)


def freeze_and_save(saved: Path, out: Path) -> None:
    rng = np.random.default_rng(6)
    expected, actual, session = make_pair(saved, rng, ranks_per_node=2)
    for model in (expected, actual):
        for block in moe_blocks(model).values():
            block.experts.down_proj.requires_grad_(False)
    step = Step.random(rng, micro_steps=1)
    step.apply(rng, session)
    batch = step.batch(0, session.rank)
    with replayed(expected, batch):
        batch.loss(expected).backward()
    with session.micro_step(0, positions=batch.positions):
        batch.loss(actual).backward()
    session.finish_gradients()
    for (name, one), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        if "experts.down_proj" in name:
            assert one.grad is None
            assert other.grad is None
        else:
            assert relative_error(one.grad.to_local(), other.grad.to_local()) < 1e-5, name
    optimizer_of(actual).step()
    whole = {name: parameter.detach().full_tensor() for name, parameter in actual.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, out / "whole.pt")
    actual.save_pretrained(out / "checkpoint")


def test_frozen_experts_stay_frozen_and_the_frameworks_checkpoints_load(saved: Path, tmp_path: Path) -> None:
    on_ranks(freeze_and_save, (saved, tmp_path), ranks=2)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).state_dict()
    for name, tensor in torch.load(tmp_path / "whole.pt").items():
        assert torch.equal(tensor, state[name]), name


def refuse(saved: Path) -> None:
    register()
    with pytest.raises(InputError, match="tp_size = 1; this model has ep_size = 2 and tp_size = 2"):
        load(saved, fsdp_size=1, tp_size=2)
    with pytest.raises(ValueError, match=r"deepgemm_megamoe.* runs with .*got `ep_implementation='trimtab'`"):
        load(saved, experts="deepgemm_megamoe")
    session = Session(num_experts=NUM_EXPERTS)
    plain: Any = AutoModelForCausalLM.from_pretrained(saved / "qwen3_moe")
    for other in (plain, load(saved, "all_to_all"), load(saved, ep_size=1)):
        with pytest.raises(InputError, match="decoder layer 0 are not run by 'trimtab'; load the model with Distrib"):
            use_session(other, session)
    with pytest.raises(InputError, match="load the model without fsdp_cpu_offload"):
        use_session(load(saved, fsdp_cpu_offload=True), session)
    llama = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8)
    with pytest.raises(InputError, match="model type 'llama' is not supported"):
        use_session(LlamaForCausalLM(llama), session)

    model = load(saved)
    with pytest.raises(InputError, match="hold 8 in gate_up_proj and the session is for 16"):
        use_session(model, Session(num_experts=16))
    with pytest.raises(InputError, match=r"spread over ranks \[0, 1\]; the session should have these in one group"):
        use_session(model, Session(num_experts=NUM_EXPERTS, groups=2))
    experts = moe_blocks(model)[2].experts
    experts.register_parameter("gate_up_proj_scale_inv", nn.Parameter(torch.ones(4)))
    with pytest.raises(InputError, match=r"layer 2 .* hold .*scale_inv.*load the model unquantized"):
        use_session(model, session)
    del experts.gate_up_proj_scale_inv
    assert not session.layers
    use_session(model, session)
    with pytest.raises(InputError, match="has 2 layers and 0 optimizers already; give the model a new session"):
        use_session(model, session)
    with pytest.raises(InputError, match="in another session already"):
        use_session(model, Session(num_experts=NUM_EXPERTS))
    with pytest.raises(InputError, match="can't move experts with their optimizer state: its experts belong to"):
        session.register_optimizers(optimizer_of(model))
    with pytest.raises(InputError, match="can't move experts: "):
        session.move(Placement(session.placement.home[:, ::-1].copy()))
    with pytest.raises(InputError, match="can't clip their gradients"):
        session.clip_gradients([], 1.0)
    with pytest.raises(InputError, match="can't collect or load them"):
        session.logical_state_dict(model)


def test_unsupported_configurations_are_refused(saved: Path) -> None:
    on_ranks(refuse, (saved,), ranks=2)


def refuse_shapes(saved: Path) -> None:
    register()
    shapes: list[dict[str, Any]] = [{"ep_size": 2}, {"ep_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}]
    for sizes in shapes:
        with pytest.raises(InputError, match="all 4 ranks and tp_size = 1; this model has ep_size = 2 and tp_size = 1"):
            load(saved, **sizes)


def test_several_copies_of_the_experts_are_refused(saved: Path) -> None:
    on_ranks(refuse_shapes, (saved,), ranks=4)
