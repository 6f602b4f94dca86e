"""verl 0.9.1's Megatron engine on two CPU ranks: its own replay of routing against the same with Trimtab's engine.

Real: the engine with its micro-batches by length, THD packing, replay and patch of routers, weight sync and offload;
mbridge's Qwen3-MoE bridge; Megatron's DDP and distributed optimizer. Replaced: the check that the dtype is not float32,
the loss, Ray's workers, and what is in `verl_fakes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers.equality import relative_error
from helpers.random_choices import quotas_of_few
from helpers.random_plans import random_group_plans
from helpers.verl_fakes import EXPERTS, LAYERS, TOP_K, VOCABULARY, CheckpointManager, model_config, prepare
from trimtab.integrations.megatron import balancing
from trimtab.planner import Placement, PlannedStep, Schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import step_planner
from trimtab.runtime.live import balancer

SEQUENCES, LONGEST, TOKEN_BUDGET = 10, 60, 96
FLAG = "trimtab.integrations.verl"


@dataclass(frozen=True)
class VerlCase:
    """One comparison.

    Attributes:
        trimtab: options of the plugin, as in the config of the actor.
        exact: plans give every rank equally many rows; otherwise replicas, and homes with moves, are random.
        reads_all: all rows count as read, as in a model with an auxiliary loss, and all log-probs are compared.
        replay: verl's mode of router replay.
        missing: rows at the end of a sequence for which the rollout has no routes, 0 or 1.
        by_length: micro-batches have at most so many tokens; otherwise 5 sequences each.
    """

    trimtab: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    reads_all: bool = False
    replay: str = "R3"
    missing: int = 1
    by_length: bool = True
    tensor: int = 1
    pipeline: int = 1
    dtype: str = "float32"
    recompute: bool = False
    offload: bool = False
    steps: int = 2


@dataclass
class Run:
    """What a run of an engine gave.

    Attributes:
        tensors: by step and name: log-probs, losses, `main_grad`s, norms of gradients and exported weights.
        metrics: of every training step, what the engine returns; on the last pipeline stage.
        reports: plans of all passes; None for passes without.
        training: the plans of training passes.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    training: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs on a rank, and what the balanced one planned.

    Attributes:
        errors: the largest relative difference by kind: `log_probs`, `loss`, `grad`, `norm`, `weight`.
        compared: number of tensors by kind.
        planned: passes with a plan, and passes without.
        replicas, mixed, unplanned: replicas, mixed instances and unplanned micro-steps of all plans.
        metrics: of the last training step; empty but on the last pipeline stage.
    """

    errors: dict[str, float]
    compared: dict[str, int]
    planned: tuple[int, int]
    replicas: int
    mixed: int
    unplanned: int
    metrics: dict[str, Any]


def compare(case: VerlCase) -> Comparison:
    """verl's own run against the same with Trimtab's engine, on this rank."""
    prepare()
    plain, balanced = run(case, is_balanced=False), run(case, is_balanced=True)
    errors: dict[str, float] = {}
    compared: dict[str, int] = {}
    for name, value in balanced.tensors.items():
        kind = name.split()[1]
        error = relative_error(value.double(), plain.tensors[name].double())
        errors[kind] = max(errors.get(kind, 0.0), error)
        compared[kind] = compared.get(kind, 0) + 1
    reports = [report for report in balanced.reports if report is not None]
    return Comparison(
        errors, compared, (len(reports), len(balanced.reports) - len(reports)),
        replicas=sum(report.replicas for report in reports),
        mixed=sum(report.mixed_instances for report in reports),
        unplanned=sum(report.unplanned_micro_steps for report in reports),
        metrics=balanced.metrics[-1] if balanced.metrics else {},
    )  # fmt: skip


def run(case: VerlCase, *, is_balanced: bool) -> Run:
    """Log-probs and training steps of one engine."""
    result = Run()
    with engine_of(case, is_balanced=is_balanced) as engine, plans_of(case, engine):
        for step in range(case.steps):
            data = batch(case, step)
            output = engine_pass(engine, data, result, forward_only=True)
            if case.replay == "R2":
                # The pass has recorded.
                data["routed_experts"] = output["model_output"]["routed_experts"]
            if output:
                log_probs = output["model_output"]["log_probs"].values()
                is_compared = 1 if case.reads_all else data["loss_mask"].values()
                result.tensors[f"{step} log_probs"] = log_probs * is_compared
            with mock.patch.object(engine, "optimizer_step", partial(_step, engine, result, step)):
                output = engine_pass(engine, data, result, forward_only=False)
            if output:
                result.metrics.append(output["metrics"])
                result.tensors[f"{step} loss"] = torch.tensor(output["loss"])
        pairs, peft_config = engine.get_per_tensor_param()
        assert peft_config is None
        result.tensors |= {f"{case.steps} weight {name}": tensor.clone() for name, tensor in pairs}
    return result


def engine_pass(engine: Any, data: Any, result: Run, *, forward_only: bool) -> Any:
    """A pass as verl's worker runs it, with the plan that it had."""
    session = getattr(engine, "session", None)
    before = None if session is None else session.report
    if forward_only:
        with engine.eval_mode():
            output = engine.infer_batch(data.clone())
    else:
        with engine.train_mode():
            output = engine.train_batch(data.clone(), loss)
    report = None if session is None else session.report
    for reports in (result.reports,) if forward_only else (result.reports, result.training):
        reports.append(None if report is before else report)
    return output


def _step(engine: Any, result: Run, step: int) -> Any:
    """The optimizer's step, after a copy of all gradients."""
    for name, parameter in [pair for chunk in engine.module for pair in chunk.named_parameters()]:
        result.tensors[f"{step} grad {name}"] = parameter.main_grad.clone()
    norm = type(engine).optimizer_step(engine)
    result.tensors[f"{step} norm"] = torch.tensor(float(norm))
    return norm


@contextmanager
def plans_of(case: VerlCase, engine: Any) -> Iterator[None]:
    """Plans of an engine's passes: random ones, unless they are exact."""
    session = getattr(engine, "session", None)
    if session is None or case.exact or session.session.mode != "plan":
        yield
        return
    plans = np.random.default_rng(3)

    def random_plans(
        loads: StepLoads, schedule: Schedule, placement: Placement, *_: Any, **_chosen: Any
    ) -> PlannedStep:
        return random_group_plans(plans, loads, schedule, placement, session.session.topology.ranks_per_node)

    with mock.patch.object(step_planner, "plan_schedule", random_plans):
        yield


@contextmanager
def engine_of(case: VerlCase, *, is_balanced: bool = True, **changes: Any) -> Iterator[Any]:
    """An engine by verl's registry, initialized as verl's worker does. What it prints is in its attribute `printed`.

    Args:
        changes: other values of the engine's config. A reference engine (`forward_only`) uses the process groups of
            the engine before it.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.workers.engine.megatron import transformer_impl

    if not changes.get("forward_only"):
        parallel_state.destroy_model_parallel()
    printed: list[str] = []
    options = {"exact": True} if case.exact else {"policy": "quota"} if case.trimtab.get("mode") == "live" else {}
    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ, {"VERL_ENGINE_DEVICE": "cuda"}))
        patch(mock.patch.object(transformer_impl, "MegatronCheckpointManager", CheckpointManager))
        patch(mock.patch("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))))
        patch(mock.patch.object(balancing, "balance", partial(balancing.balance, **options)))
        # Few tokens are enough for a replica of live mode.
        patch(mock.patch.object(balancer, "choose_quotas", quotas_of_few))
        engine = make_engine(case, is_balanced=is_balanced, **changes)
        engine.printed = printed
        # verl does it where torch sees a device.
        model_parallel_cuda_manual_seed(42)
        engine.initialize()
        if case.reads_all and getattr(engine, "session", None) is not None:
            engine.session.session.auxiliary_loss = lambda: "a loss of this test"
        try:
            yield engine
        finally:
            if getattr(engine, "adapter", None) is not None:
                engine.adapter.uninstall()


def make_engine(case: VerlCase, *, is_balanced: bool, **changes: Any) -> Any:
    """An engine by verl's registry, with the flag or without."""
    from verl.utils.import_utils import import_external_libs
    from verl.workers.engine import EngineRegistry

    os.environ.pop("VERL_ENGINE_VENDOR", None)
    if is_balanced:
        # As `HFModelConfig` does. In later calls the module is there already.
        import_external_libs(FLAG)
        os.environ["VERL_ENGINE_VENDOR"] = "trimtab"
    config = engine_config(case, is_balanced)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return EngineRegistry.new(
        "language_model", "megatron", model_config=model_config(), engine_config=config,
        optimizer_config=optimizer_config(), checkpoint_config=None,
    )  # fmt: skip


def batch(case: VerlCase, step: int) -> Any:
    """A mini-batch as verl's worker gets it: jagged prompts and responses, and recorded routes. The last sequence has
    no response that is trained."""
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils

    rng = np.random.default_rng((step, parallel_state.get_data_parallel_rank()))
    skew = rng.gumbel(size=(LAYERS, EXPERTS))
    tokens, masks, advantages, routes = [], [], [], []
    response_mask = np.zeros((SEQUENCES, LONGEST), np.int64)
    for sequence, length in enumerate(rng.integers(12, LONGEST, SEQUENCES)):
        prompt = int(rng.integers(3, length - 4))
        is_trained = sequence < SEQUENCES - 1
        tokens.append(torch.from_numpy(rng.integers(1, VOCABULARY, length)))
        # A row predicts the next token; nothing reads the last row.
        mask = torch.zeros(int(length))
        mask[prompt - 1 : length - 1] = float(is_trained)
        masks.append(mask)
        advantages.append(torch.full((int(length),), float(rng.normal())))
        scores = rng.gumbel(size=(length - case.missing, LAYERS, EXPERTS)) + skew
        routes.append(torch.from_numpy(np.argsort(-scores, -1)[..., :TOP_K].astype(np.int16)))
        response_mask[sequence, : length - prompt] = is_trained
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(tokens), "loss_mask": nested(masks), "advantages": nested(advantages),
        "response_mask": torch.from_numpy(response_mask), "temperature": torch.ones(SEQUENCES),
    }  # fmt: skip
    if case.replay == "R3":
        tensors["routed_experts"] = nested(routes)
    return tensordict_utils.get_tensordict(
        tensors,
        {"use_dynamic_bsz": case.by_length, "max_token_len_per_gpu": TOKEN_BUDGET, "micro_batch_size_per_gpu": 5,
         "enable_routing_replay": True, "calculate_entropy": False},
    )  # fmt: skip


def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Weighted log-probs of the trained tokens, over their number on all ranks."""
    log_probs, advantages, mask = (
        each.values() for each in (model_output["log_probs"], data["advantages"], data["loss_mask"])
    )
    value = -(log_probs * advantages * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return value, {"actor/pg_loss": float(value.detach())}


def engine_config(case: VerlCase, is_balanced: bool) -> Any:
    from verl.workers.config import McoreEngineConfig

    transformer = {
        "moe_grouped_gemm": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        "use_cpu_initialization": True, "apply_rope_fusion": False, "qk_layernorm": False, "normalization": "RMSNorm",
    }  # fmt: skip
    if case.recompute:
        transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = McoreEngineConfig(
        expert_model_parallel_size=2, expert_tensor_parallel_size=1, tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        vanilla_mbridge=True, use_distributed_optimizer=True, override_transformer_config=transformer,
        override_mcore_model_config={"trimtab": dict(case.trimtab)} if is_balanced else {},
        param_offload=case.offload, optimizer_offload=case.offload, use_dynamic_bsz=True,
        max_token_len_per_gpu=TOKEN_BUDGET,
    )  # fmt: skip
    # verl refuses float32, in which differences show.
    object.__setattr__(config, "dtype", case.dtype)
    object.__setattr__(config.router_replay, "mode", case.replay)
    return config


def optimizer_config() -> Any:
    from verl.workers.config import McoreOptimizerConfig

    return McoreOptimizerConfig(lr=1e-3, clip_grad=1.0, weight_decay=0.0, lr_warmup_steps=0, total_training_steps=10)
