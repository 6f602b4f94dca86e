"""A model in transformers' own expert parallelism and a session equals the same model with "all_to_all"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers.integrations.accelerate as loading
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from helpers.equality import relative_error
from helpers.examples import nightly_except
from helpers.moe_families import MODEL_TYPES, NUM_EXPERTS, TOP_K, all_chosen, random_model, small_config
from helpers.random_choices import quotas_of_few
from helpers.random_plans import random_plan, random_schedule, random_trace
from helpers.rank_tests import of_all_ranks, runs_on_ranks
from recipes.rl.batches import MicroBatch, collate, token_log_probs
from recipes.rl.responses import Response
from trimtab import InputError, Workload
from trimtab.integrations.expert_parallel import register, use_session
from trimtab.integrations.transformers import moe_blocks
from trimtab.runtime import Session
from trimtab.runtime.live import balancer
from trimtab.runtime.live.balancer import LivePolicy
from trimtab.trace import hash_tokens

VOCAB = 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved random models of every family."""
    path = tmp_path_factory.mktemp("models")
    for seed, family in enumerate(MODEL_TYPES):
        torch.manual_seed(seed)
        random_model(small_config(family), torch.float32).save_pretrained(path / family)
    return path


def load(
    saved: Path, implementation: str = "trimtab", family: str = "qwen3_moe", dtype: torch.dtype = torch.float32,
    experts: str | None = None, **sizes: Any,
) -> Any:  # fmt: skip
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


class Step:
    """Random sequences of all ranks with random routing, and their schedule."""

    def __init__(self, rng: np.random.Generator, micro_steps: int, moe_layers: int = 2) -> None:
        sizes = {"num_layers": moe_layers, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
        trace = random_trace(rng, num_sequences=7, max_length=9, **sizes)
        self.sequences = [
            Response(rng.integers(0, VOCAB, len(ids) + 1), 1, ids, np.zeros(len(ids), np.float32), advantage=0.05)
            for ids in map(trace.sequence, range(7))
        ]
        hashes = [hash_tokens(sequence.token_ids) for sequence in self.sequences]
        self.trace = replace(trace, sequence_hashes=np.array(hashes, np.uint64))
        self.schedule = random_schedule(rng, 7, num_ranks=2, num_micro_steps=micro_steps)

    def apply(self, rng: np.random.Generator, session: Session) -> int:
        """Give the session a random plan. Returns how many replicas it has."""
        workload = Workload.from_trace(self.trace, self.schedule)
        per_node = session.topology.ranks_per_node
        plan = random_plan(rng, workload, self.schedule, slots=session.slots_per_rank, ranks_per_node=per_node)
        session.apply_step_plan(plan, self.trace.select(self.schedule.sequences_of(session.rank)))
        return plan.num_replicas

    def batch(self, micro_step: int) -> Batch:
        is_mine = (self.schedule.rank == dist.get_rank()) & (self.schedule.micro_step == micro_step)
        return Batch.of([self.sequences[index] for index in np.flatnonzero(is_mine)], self.trace.num_layers)


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch, and the routing `[N, L, K]` of its rows, with any experts for padding."""

    rows: MicroBatch
    ids_NLK: torch.Tensor

    @classmethod
    def of(cls, sequences: list[Response], layers: int) -> Batch:
        rows = collate(sequences, pad_token_id=0, device=torch.device("cpu"))
        ids_NLK = torch.arange(TOP_K).repeat(rows.input_ids.numel(), layers, 1)
        if sequences:
            ids = np.concatenate([sequence.expert_ids for sequence in sequences])
            ids_NLK[rows.positions] = torch.from_numpy(ids.astype(np.int64))
        return cls(rows, ids_NLK)

    def loss(self, model: Any) -> torch.Tensor:
        logits = model(input_ids=self.rows.input_ids, use_cache=False).logits
        log_probs = token_log_probs(logits, self.rows.targets)
        return -(log_probs * self.rows.response_mask * self.rows.advantages).sum()


class Pair:
    """A model with "all_to_all", the same model in a session, and their optimizers.

    Args:
        session: options of the session.
        frozen: the down projections of experts are frozen.
        sizes: as of `load`.
    """

    def __init__(
        self, saved: Path, *, frozen: bool = False, session: dict[str, Any] | None = None, **sizes: Any
    ) -> None:
        register()
        torch.set_num_threads(1)
        self.expected, self.actual = self.both = load(saved, "all_to_all", **sizes), load(saved, **sizes)
        self.session = Session(num_experts=NUM_EXPERTS, **session or {})
        use_session(self.actual, self.session)
        # Rounding in bfloat16.
        self.tolerance = 0.1 if "fsdp_mixed_precision" in sizes else 1e-5
        for model in self.both:
            for block in moe_blocks(model).values():
                block.experts.down_proj.requires_grad_(not frozen)
        self._optimizers = [optimizer_of(model) for model in self.both]

    def accumulate(
        self, batch: Batch, context: Any, *, replays: bool = True, is_last: bool = True, within: bool = True
    ) -> torch.Tensor:
        """Run a micro-step of both models, the second one in a context, perhaps with its backward. Returns the loss."""
        for model in self.both:
            model.set_requires_gradient_sync(is_last)
        with all_chosen(self.expected, batch.ids_NLK) if replays else nullcontext():
            wanted = batch.loss(self.expected)
            wanted.backward()
        with ExitStack() as stack:
            stack.enter_context(context)
            loss = batch.loss(self.actual)
            if not within:
                stack.close()
            loss.backward()
        assert relative_error(loss, wanted) < self.tolerance
        return wanted.detach()

    def finish(self, case: object) -> None:
        """Complete the gradients and compare them."""
        self.session.finish_gradients()
        check_gradients(self.actual, self.expected, self.tolerance, case)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def check_gradients(actual: Any, expected: Any, tolerance: float, case: object) -> None:
    """Compare gradients, sharded in the same way or expected ones whole; expected losses are summed over ranks."""
    for (name, one), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == (not one.requires_grad), (case, name)
        if one.grad is None:
            continue
        if hasattr(other.grad, "to_local"):
            error = relative_error(one.grad.to_local(), other.grad.to_local())
        else:
            error = relative_error(one.grad.full_tensor(), other.grad / dist.get_world_size())
        assert error < tolerance, (case, name, error)


@dataclass(frozen=True)
class Case:
    seed: int
    sync_always: bool = False
    checkpointing: str = "none"
    sizes: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case(0, sync_always=True), Case(1), Case(2, checkpointing="plain"),
    Case(3, sync_always=True, checkpointing="reentrant"), Case(4, sizes={"frozen": True}),
    Case(5, sizes={"fsdp_mixed_precision": True}),
    # In float32, rounding can push activations over a limit that GPT-OSS has for them.
    *(Case(6 + n, sizes={"family": f, "dtype": torch.float64}) for n, f in enumerate(MODEL_TYPES[1:])),
]  # fmt: skip


@pytest.mark.parametrize("case", nightly_except(CASES, CASES[3], CASES[9]))
@runs_on_ranks()
def test_random_plans_equal_all_to_all(saved: Path, case: Case, tmp_path: Path) -> None:
    """In recompute and update, over optimizer steps, with gradients reduced after every micro-step or once; and the
    framework's checkpoints load."""
    rng = np.random.default_rng(case.seed)
    options = {"slots_per_rank": int(rng.integers(1, 4)), "ring_layers": int(rng.integers(2, 4))}
    pair = Pair(saved, session=options | {"ranks_per_node": 1 + case.seed % 2}, **case.sizes)
    session, actual = pair.session, pair.actual
    if case.checkpointing != "none":
        actual.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
    replicas = 0
    for step_index in range(2):
        step = Step(rng, micro_steps=3, moe_layers=len(session.layers))
        replicas += step.apply(rng, session)
        recomputed = {}
        for index in rng.permutation(3).tolist():
            batch = step.batch(index)
            with torch.no_grad(), session.micro_step(index, positions=batch.rows.positions):
                check_sources(pair)
                recomputed[index] = batch.loss(actual)
        order = rng.permutation(3).tolist()
        for index in order:
            batch = step.batch(index)
            context = session.micro_step(
                index, positions=batch.rows.positions, sequence_hashes=batch.rows.sequence_hashes
            )
            wanted = pair.accumulate(batch, context, is_last=case.sync_always or index == order[-1])
            assert relative_error(recomputed[index], wanted) < pair.tolerance, (case, step_index)
        pair.finish((case, step_index))
        if step_index == 0 and not case.sizes:
            # Of float64, FSDP2 divides gradients twice where one rank has all of a parameter.
            plain: Any = AutoModelForCausalLM.from_pretrained(saved / "qwen3_moe", experts_implementation="eager")
            whole = Batch.of(step.sequences, step.trace.num_layers)
            with all_chosen(plain, whole.ids_NLK):
                whole.loss(plain).backward()
            check_gradients(actual, plain, 1e-5, (case, "one process"))
        pair.step()
    assert replicas > 10
    assert session.take_metrics()["transfer/gradient_bytes"] > 0
    assert session.counters.unplanned_micro_steps == 0
    actual.save_pretrained(tmp_path / "checkpoint")
    dist.barrier()
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).state_dict()
    for name, parameter in actual.named_parameters():
        assert torch.equal(parameter.detach().full_tensor().float(), state[name]), name
    session.close()


def check_sources(pair: Pair) -> None:
    """In mixed precision, experts compute with copies in bfloat16."""
    if pair.actual.config.distributed_config.fsdp_mixed_precision:
        for layer, block in zip(pair.session.layers, moe_blocks(pair.actual).values(), strict=True):
            for source, name in zip(layer.homes.sources, ("gate_up_proj", "down_proj"), strict=True):
                assert isinstance(source, torch.Tensor)
                assert torch.equal(source, getattr(block.experts, name).to_local().bfloat16())


@runs_on_ranks()
def test_without_a_plan_results_are_those_of_all_to_all(saved: Path) -> None:
    """Before there is a session, outside of micro-steps, and with other sequences than the planned ones."""
    rng = np.random.default_rng(5)
    register()
    step = Step(rng, micro_steps=1)
    batch = step.batch(0)
    assert torch.equal(batch.loss(load(saved)), batch.loss(load(saved, "all_to_all")))
    pair = Pair(saved)
    session = pair.session
    step.apply(rng, session)
    # One rank's batch is another one, which unplans the micro-step on all.
    hashes = batch.rows.sequence_hashes + np.uint64(dist.get_rank())
    for context, unplanned in ((nullcontext(), 0), (session.micro_step(0, sequence_hashes=hashes), 1)):
        pair.accumulate(batch, context, replays=False)
        pair.finish(unplanned)
        assert session.counters.unplanned_micro_steps == unplanned
    assert session.take_metrics()["transfer/gradient_bytes"] == 0


@pytest.mark.parametrize(("seed", "policy"), list(enumerate(("quota", "feplb"))))
@runs_on_ranks()
@mock.patch.object(balancer, "choose_quotas", quotas_of_few)
def test_live_micro_steps_equal_all_to_all(saved: Path, seed: int, policy: LivePolicy) -> None:
    """Rows of padding go to experts with "all_to_all" and not in the session; no token depends on them."""
    rng = np.random.default_rng((20, seed))
    pair = Pair(saved, session={"mode": "live", "policy": policy})
    pair.actual.gradient_checkpointing_enable({"use_reentrant": seed % 2 == 0})
    for step_index in range(2):
        step = Step(rng, micro_steps=2)
        for index in range(2):
            batch = step.batch(index)
            context = pair.session.live_micro_step(positions=batch.rows.positions)
            pair.accumulate(batch, context, replays=False, is_last=index == 1, within=False)
        pair.finish(step_index)
        pair.step()
    metrics = pair.session.take_metrics()
    assert metrics["live/replicas"] > 0
    assert sum(of_all_ranks(metrics["transfer/gradient_bytes"])) > 0
    pair.session.close()


@runs_on_ranks()
def test_unsupported_configurations_are_refused(saved: Path) -> None:
    register()
    with pytest.raises(ValueError, match=r"deepgemm_megamoe.* runs with .*got `ep_implementation='trimtab'`"):
        load(saved, experts="deepgemm_megamoe")
    session, model = Session(num_experts=NUM_EXPERTS), load(saved)

    def refused(message: str, model: Any = model, session: Session = session) -> None:
        with pytest.raises(InputError, match=message):
            use_session(model, session)

    plain: Any = AutoModelForCausalLM.from_pretrained(saved / "qwen3_moe")
    for other in (plain, load(saved, "all_to_all"), load(saved, ep_size=1)):
        refused("decoder layer 0 are not run by 'trimtab'; load the model with Distrib", other)
    refused("without fsdp_cpu_offload", load(saved, fsdp_cpu_offload=True))
    refused("hold 8 in gate_up_proj and the session is for 16", session=Session(num_experts=16))
    refused(r"ranks \[0, 1\]; .* in one group", session=Session(num_experts=NUM_EXPERTS, groups=2))
    experts = moe_blocks(model)[2].experts
    experts.register_parameter("gate_up_proj_scale_inv", nn.Parameter(torch.ones(4)))
    refused(r"layer 2: .* hold .*scale_inv.*unquantized")
    del experts.gate_up_proj_scale_inv
    assert not session.layers
    use_session(model, session)
    refused("has 2 layers and 0 optimizers already; .* new session")
    refused("in another session already", session=Session(num_experts=NUM_EXPERTS))
    calls: dict[str, Callable[[], Any]] = {
        "can't be registered with optimizers": lambda: session.register_optimizers(optimizer_of(model)),
        "can't renumber them: ": lambda: session.renumber(np.tile(np.arange(NUM_EXPERTS)[::-1], (2, 1))),
        "can't clip their gradients": lambda: session.clip_gradients([], 1.0),
        "can't collect or load them": lambda: session.whole_state_dict(model),
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=message):
            call()
