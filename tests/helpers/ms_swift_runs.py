"""Runs of ms-swift's trainer, as it is and with the plugin, on equal models and the same batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from helpers import ms_swift_stand_in as stand_in
from helpers.megatron_runs import LENGTH, Layout
from helpers.ms_swift_stand_in import RL_UTILS, get_packed_seq_params, import_external_file, swift
from helpers.plugin_runs import gradients, model_on, plans_at_random, use_routers
from trimtab.integrations.ms_swift import PLUGIN_FILE

STEPS, MICRO_BATCHES = 2, 2
EP_2 = Layout(2, 2)


class Run:
    """A trainer and its steps: log-probabilities of reference and actor, then an optimizer step.

    Attributes:
        planned: replicas of each pass of log-probabilities, of actor and reference; None if it was not planned.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.planned: list[int | None] = []

    def steps(self, batches: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Log-probabilities, losses and gradients, by name. Memory is freed before, as during generation."""
        tests = self.trainer.args.of_tests
        use_routers(tests.actor, tests.reference)
        found: dict[str, Any] = {}
        for step, batch in enumerate(batches):
            self._sleep()
            micro_batches = []
            for number, each in enumerate(batch):
                for session in sessions(self):
                    session.report = None
                data = self.trainer._maybe_compute_logps(copy(each) | {"grpo_batch": copy(each["grpo_batch"])})
                starts = stand_in.get_packed_seq_params(None, each["position_ids"]).cu_seqlens_q
                is_read = stand_in.split_cp_inputs(each["labels"].roll(-1, -1) != -100, starts, 1)
                for name in ("ref", "old"):
                    values = getattr(data["grpo_batch"], f"{name}_per_token_logps")
                    if values is not None:
                        found[f"{step} {name} {number}"] = values.masked_fill(~is_read, 0)
                micro_batches.append(data)
                self.planned += [session.report and session.report.replicas for session in sessions(self)]
            # The optimizer's step follows in the same call.
            optimizer = self.trainer.optimizer
            with mock.patch.object(optimizer, "step", partial(self._keep, found, step, optimizer.step)):
                self.trainer.run_train_step(iter(micro_batches))
        found["loss"] = torch.tensor([step["loss"] for step in self.trainer.logged[-STEPS:]])
        return found

    def _sleep(self) -> None:
        models = self.trainer.wrapped_models
        if models[0].ddp_config.use_distributed_optimizer:
            trainers = swift(stand_in.TRAINERS)
            trainers.offload_megatron_model_to_cpu(models)
            trainers.load_megatron_model_to_gpu(models)

    def _keep(self, found: dict[str, Any], step: int, plain: Any) -> Any:
        found |= gradients(step, self.trainer.args.of_tests.actor.named_parameters())
        return plain()


class Runs:
    """Runs of equal models on the same batches, in ms-swift as it is and with the plugin.

    Attributes:
        other: the last run with the plugin.
    """

    other: Run

    def __init__(self, layout: Layout = EP_2, **case: Any) -> None:
        options = {"double": True, "recompute": "uniform", "router_replay": True} | case
        self.model, rng = model_on(layout, **options)
        self.reference = self.model.copy()
        with_packed_mask(self.reference)
        # In ms-swift it is not in DDP.
        for chunk in self.reference.chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=False)
        layers = self.model.config.moe_layer_freq
        self.batches = [
            [random_batch(rng, LENGTH, layers, layout.context) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)
        ]

    def trainer(self, **more: Any) -> Any:
        actor = self.model.copy()
        with_packed_mask(actor)
        trainer = swift(stand_in.GRPO).MegatronGRPOTrainer
        return trainer(arguments(actor, self.reference, **more), SimpleNamespace(padding_free=True))

    def expected(self, **more: Any) -> dict[str, Any]:
        return Run(self.trainer(**more)).steps(self.batches)

    @contextmanager
    def balanced(self, text: str = "", **more: Any) -> Iterator[Run]:
        """A trainer of a process with the flag, and replicas drawn at random."""
        trainer = swift(stand_in.BASE).BaseMegatronTrainer
        with (
            mock.patch.dict(os.environ, TRIMTAB_BALANCE=text),
            mock.patch.object(trainer, "__init__", trainer.__init__),
        ):
            sys.modules.pop(PLUGIN_FILE.stem, None)
            import_external_file(PLUGIN_FILE)
            self.other = Run(self.trainer(**more))
        try:
            with plans_at_random():
                yield self.other
        finally:
            self.other.trainer.trimtab_plugin.uninstall()


def sessions(run: Run) -> list[Any]:
    plugin = getattr(run.trainer, "trimtab_plugin", None)
    return [] if plugin is None or plugin.adapter is None else plugin.adapter.sessions


def figures(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if "/" in name} for step in run.trainer.logged[-STEPS:]]


def random_batch(rng: np.random.Generator, length: int, layers: Sequence[int], context: int = 1) -> dict[str, Any]:
    """A micro-batch of two packed sequences, as ms-swift collates them after a rollout.

    Args:
        length: tokens of the micro-batch, with padding.
        layers: 1 for each MoE layer of the model, 0 for others, which have routes of zeros.
        context: ranks of context parallelism; each sequence is padded to two parts for each of them.
    """
    samples, part = [], 2 * context if context > 1 else 1
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for missing in (0, 1):
        count = int(rng.integers(length // 4, length // 2 - 1))
        prompt = int(rng.integers(1, count - 1))
        ids = rng.permuted(np.broadcast_to(np.arange(8), (count, len(layers), 8)), axis=-1)[..., :2]
        # vLLM may leave out the last token.
        routes = torch.from_numpy(ids * np.asarray(layers)[:, None])[: count - missing]
        samples.append(SimpleNamespace(routed_experts=routes, encoded={"length": count}))
        own, padded = rng.integers(0, 64, count).tolist(), -(-count // part) * part
        tokens += own + [0] * (padded - count)
        labels += [-100] * prompt + own[prompt:] + [-100] * (padded - count)
        positions += range(padded)
    rest = length - len(tokens)
    positions += list(range(part)) * (rest // part) if context > 1 else [0] * rest
    position_ids = torch.tensor([positions])
    lengths = get_packed_seq_params(None, position_ids).cu_seqlens_q.diff()
    routes = swift(RL_UTILS).build_routed_experts_batch(
        samples, seq_lengths=lengths, max_seq_len=int(lengths.max()),
        template=SimpleNamespace(padding_side="right", padding_free=True), device="cpu", router_replay_mode="R3",
        expected_lens=[each.encoded["length"] for each in samples],
    )  # fmt: skip
    return {
        "input_ids": torch.tensor([tokens + [0] * rest]), "labels": torch.tensor([labels + [-100] * rest]),
        "position_ids": position_ids, "routed_experts": routes,
        "seq_lens": [each.encoded["length"] for each in samples],
        "grpo_batch": SimpleNamespace(completion_mask=torch.ones(2, length, dtype=torch.bool), seq_lengths=lengths),
    }  # fmt: skip


def arguments(actor: Any = None, reference: Any = None, config: Any = None, **more: Any) -> SimpleNamespace:
    """ms-swift's arguments, those that are read."""
    layout = getattr(actor, "layout", None)
    values: dict[str, Any] = {
        "of_tests": SimpleNamespace(actor=actor, reference=reference, config=config), "rlhf_type": "grpo",
        "router_replay_mode": "R3", "tuner_type": "full", "padding_free": True, "task_type": "causal_lm",
        "is_multimodal": False, "use_ray": False, "cp_partition_mode": "zigzag", "sequence_packing_scheduler": None,
        "virtual_pipeline_model_parallel_size": None, "dsa_indexer_loss_coeff": 0.0, "mtp_num_layers": None,
        "tensor_model_parallel_size": getattr(layout, "tensor", 1), "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": getattr(layout, "pipeline", 1),
        "context_parallel_size": getattr(layout, "context", 1),
        "micro_batch_size": 1, "num_microbatches": 2, "global_batch_size": 2, "seq_length": 16,
    }  # fmt: skip
    return SimpleNamespace(**values | more)


def with_packed_mask(model: Any) -> None:
    """Attention on a CPU takes a mask in place of the boundaries of packed sequences."""
    names = ("input_ids", "position_ids", "attention_mask")

    def replace(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        length = kwargs["input_ids"].shape[1]
        ends = kwargs["packed_seq_params"].cu_seqlens_q[1:] * length // kwargs["packed_seq_params"].cu_seqlens_q[-1]
        position = torch.arange(length)
        sequence = torch.searchsorted(ends, position, right=True)
        is_hidden = (position > position[:, None]) | (sequence != sequence[:, None])
        return args, {name: kwargs[name] for name in names} | {"attention_mask": is_hidden[None, None]}

    for each in model.models:
        each.register_forward_pre_hook(replace, with_kwargs=True)
