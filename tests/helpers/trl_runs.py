"""Runs of TRL's GRPO trainer with a small model: TRL's own, and the same with balanced experts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers.integrations.accelerate as loading
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer

from helpers.equality import relative_error
from helpers.moe_families import MOE_LAYERS, NUM_EXPERTS, TOP_K, random_model, small_config
from helpers.random_plans import random_group_plans
from recipes.rl.task import build_tokenizer
from trimtab import RoutingTrace
from trimtab.integrations.transformers import replay_routing
from trimtab.integrations.trl import TrimtabGRPOTrainer
from trimtab.planner import Placement, PlannedStep, Schedule, plan_schedule
from trimtab.planner.plan.step_loads import StepLoads
from trimtab.runtime import step_planner


@dataclass(frozen=True)
class Run:
    """A run of a trainer.

    Attributes:
        options: of `GRPOConfig`, other than the common ones.
        changes: of the model's config.
        routes: rollouts give routes: "none"; "random"; "short", without those of last tokens, and some are unknown.
        generates: completions are generated, not drawn at random.
        prompts: rows of the dataset.
        by_name: the trainer loads the model, by `model_init_kwargs`.
        sizes: of `DistributedConfig`; by default experts over all ranks.
        session: `session_options`. With a mode, plans are not random.
        evaluates_first: the trainers evaluate before they train.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model_type: str = "qwen3_moe"
    changes: dict[str, Any] = field(default_factory=dict)
    routes: str = "none"
    generates: bool = False
    prompts: int = 24
    dtype: torch.dtype = torch.float64
    by_name: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    evaluates_first: bool = False


@dataclass
class Result:
    """What a run computed: this rank's shards of the gradients of every optimizer step, after clipping, by name; norms
    and losses as TRL logs them; replicas of all plans."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    replicas: int = 0


class Watch(TrainerCallback):
    """Stores the gradients of every optimizer step."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        parameters = self.trainer.model.named_parameters()
        gradients = {
            name: local(parameter.grad).clone() for name, parameter in parameters if parameter.grad is not None
        }
        self._result.gradients.append(gradients)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of plus signs and of ones."""
    return [(text.count("+") + 0.5 * text.count("1")) / max(len(text), 1) for text in completions]


def random_rollout(prompts: Sequence[str], trainer: Any, routes: str = "none") -> dict[str, Any]:
    """Random completions, of different lengths, the same in every run."""
    rng = np.random.default_rng((trainer.accelerator.process_index, trainer.state.global_step))
    tokenizer, layers = trainer.processing_class, len(MOE_LAYERS[trainer.model.config.model_type])
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    completions = [rng.integers(1, 15, int(rng.integers(2, 9))).tolist() for _ in prompts]
    for tokens in completions[::2]:
        tokens.append(tokenizer.eos_token_id)
    logprobs = [[-1.0] * len(tokens) for tokens in completions]
    output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}
    if routes != "none":
        lengths = [len(a) + len(b) - (routes == "short") for a, b in zip(prompt_ids, completions, strict=True)]
        skew = rng.gumbel(size=(layers, NUM_EXPERTS))
        ids = [np.argsort(rng.gumbel(size=(n, layers, NUM_EXPERTS)) + skew)[:, :, :TOP_K] for n in lengths]
        if routes == "short":
            ids[0][-2:] = -1
        output["routed_experts"] = ids
    if isinstance(trainer, ReplayingTrainer):
        trainer.routes = {
            (*prompt, *tokens): ids
            for prompt, tokens, ids in zip(prompt_ids, completions, output.pop("routed_experts"), strict=True)
        }
    return output


class ReplayingTrainer(GRPOTrainer):
    """TRL's trainer, with the routes of the last rollout, by tokens, replayed in all forwards."""

    routes: dict[tuple[int, ...], Any]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **named: Any
    ) -> Any:
        parts = []
        for ids, mask in zip(input_ids.split(batch_size or 99), attention_mask.split(batch_size or 99), strict=True):
            tokens = [tuple(row[places != 0].tolist()) for row, places in zip(ids, mask, strict=True)]
            trace = RoutingTrace.from_sequences([self.routes[each] for each in tokens], num_experts=NUM_EXPERTS)
            with replay_routing(self.model, trace, mask):
                parts.append(super()._get_per_token_logps_and_entropies(model, ids, mask, logits_to_keep, **named))
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return torch.cat(logps), entropies[0] if entropies[0] is None else torch.cat(entropies), aux_losses[0]


def saved_model(run: Run, folder: Path) -> Path:
    """A folder beside the run's with the small random model, written by the first rank."""
    path = folder.parent / f"{folder.name} start"
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(3)
        random_model(small_config(run.model_type, **run.changes), run.dtype).save_pretrained(path)
    dist.barrier()
    torch.manual_seed(3)
    return path


@contextmanager
def accelerate_ranks() -> Iterator[None]:
    """Accelerate uses the process group of these ranks."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        yield


class RandomPlans:
    """Replaces the planner: random replicas."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(
        self, loads: StepLoads, schedule: Schedule, placement: Placement, cluster: Any, **chosen: Any
    ) -> PlannedStep:
        assert not chosen["may_move"]
        return random_group_plans(self._rng, loads, schedule, placement, cluster.ranks_per_node)


def make_trainer(run: Run, folder: Path, *, balanced: bool, callbacks: Sequence[Any] = (), **named: Any) -> Any:
    """A trainer with a small random model in FSDP2 and expert parallelism: TRL's own, or balanced."""
    path = saved_model(run, folder)
    ranks = dist.get_world_size()
    sizes = {"fsdp_size": ranks, "ep_size": ranks} | run.sizes
    config = DistributedConfig(**sizes, ep_implementation="trimtab" if balanced else "all_to_all")
    how: dict[str, Any] = {"dtype": run.dtype, "experts_implementation": "eager", "distributed_config": config}
    # Loading asks whether accelerate is there, although it does not need it for this.
    loading.is_accelerate_available = lambda *_: True
    options: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 3,
        "max_completion_length": 9, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "weight_decay": 0.1, "router_aux_loss_coef": 0.0, "log_level": "error",
        **run.options,
    }  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"{n * n}+{n}=" for n in range(run.prompts)]})
    arguments: dict[str, Any] = {
        "model": str(path), "reward_funcs": reward, "args": GRPOConfig(**options), "train_dataset": prompts,
        "processing_class": build_tokenizer(), "callbacks": list(callbacks), **named,
    }  # fmt: skip
    if run.by_name:
        arguments["args"].model_init_kwargs = how
    elif "model" not in named:
        arguments["model"] = AutoModelForCausalLM.from_pretrained(path, **how)
    if run.options.get("eval_strategy"):
        arguments["eval_dataset"] = arguments["train_dataset"].select(range(4))
    if not run.generates:
        arguments.setdefault("rollout_func", lambda prompts, trainer: random_rollout(prompts, trainer, run.routes))
    if balanced:
        arguments["session_options"] = run.session
    plain = GRPOTrainer if run.routes == "none" else ReplayingTrainer
    trainer = (TrimtabGRPOTrainer if balanced else plain)(**arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(run: Run, folder: Path, *, balanced: bool, resume: bool = False) -> tuple[Any, Result]:
    """Train, with random plans if balanced. Returns the trainer and what it computed."""
    torch.set_num_threads(1)
    result = Result()
    watch = Watch(result)
    plans = plan_schedule if "mode" in run.session else RandomPlans(5)
    with accelerate_ranks(), mock.patch.object(step_planner, "plan_schedule", plans):
        trainer = watch.trainer = make_trainer(run, folder, balanced=balanced, callbacks=[watch])
        if balanced:
            _count(trainer, result)
        if run.evaluates_first:
            # TRL shuffles batches with the random numbers that follow.
            with torch.random.fork_rng():
                trainer.evaluate(trainer.train_dataset.select(range(4)))
        trainer.train(resume_from_checkpoint=resume or None)
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    result.norms, result.losses = [log["grad_norm"] for log in logs], [log["loss"] for log in logs]
    return trainer, result


def _count(trainer: Any, result: Result) -> None:
    plan = trainer.session.plan_micro_steps

    def counted(*args: Any, **named: Any) -> Any:
        report = plan(*args, **named)
        result.replicas += report.replicas
        return report

    trainer.session.plan_micro_steps = counted


def worst(actual: Result, expected: Result) -> float:
    """The largest relative difference of gradients, norms and losses."""
    assert len(actual.gradients) == len(expected.gradients) > 0
    found = 0.0
    for mine, whole in zip(actual.gradients, expected.gradients, strict=True):
        assert mine.keys() == whole.keys(), mine.keys() ^ whole.keys()
        for name, gradient in mine.items():
            found = max(found, relative_error(gradient, whole[name]))
    found = max([found, *np.abs(np.subtract(actual.norms, expected.norms)) / np.abs(expected.norms)])
    return max([found, *np.abs(np.subtract(actual.losses, expected.losses))])
