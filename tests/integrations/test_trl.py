"""TRL's GRPO trainer with balanced experts equals TRL's own; its files, pushed weights and refusals."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from helpers.equality import relative_error
from helpers.examples import nightly_except
from helpers.moe_families import MODEL_TYPES, random_model, small_config
from helpers.rank_tests import runs_on_ranks
from helpers.trl_runs import Result, Run, accelerate_ranks, make_trainer, random_rollout, train, worst
from trimtab import InputError
from trimtab.integrations.transformers import record_routing
from trimtab.integrations.trl import rollout_routes

# In float64.
TOLERANCE = 1e-11

on_trl_ranks = runs_on_ranks(2, "trl")
CHECKPOINTED = {"gradient_checkpointing": True}
RUNS = {
    "accumulation": Run({"max_steps": 2}),
    "iterations, checkpointing": Run({"num_iterations": 2, **CHECKPOINTED}),
    "reentrant checkpointing": Run(
        {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_steps": 2}
    ),
    "two updates to a generation": Run({"steps_per_generation": 4}),
    "two generations to an update": Run({"steps_per_generation": 2, "gradient_accumulation_steps": 4}),
    "short last update of an epoch": Run(
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "max_steps": 4}, prompts=14
    ),
    "auxiliary loss": Run({"router_aux_loss_coef": 0.1, "beta": 0.0, "max_steps": 2}),
    "entropy, no clipping, truncated completions": Run(
        {
            "entropy_coef": 0.1, "top_entropy_quantile": 0.5, "max_grad_norm": 0.0, "mask_truncated_completions": True,
            "max_steps": 2,
        }
    ),
    "evaluation before training": Run({"max_steps": 2}, evaluates_first=True),
    "generation, evaluation": Run({"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}, generates=True),
}  # fmt: skip
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
GIVEN_ROUTES = {
    "all": Run({"num_iterations": 2}, routes="random"),
    "unknown ones, and not of last tokens": Run({"steps_per_generation": 4}, routes="short"),
    "with the auxiliary loss": Run({"router_aux_loss_coef": 0.1, "max_steps": 2}, routes="short"),
}


def compare(run: Run, folder: Path) -> tuple[Result, Any]:
    """What a balanced run computed, with gradients that equal those of TRL's own, and its trainer."""
    _, plain = train(run, folder / "theirs", balanced=False)
    trainer, balanced = train(run, folder / "mine", balanced=True)
    assert worst(balanced, plain) < TOLERANCE, run
    return balanced, trainer


@pytest.mark.parametrize(
    "name",
    nightly_except([*RUNS], *(name for name in RUNS if name.startswith(("iter", "two generations", "eval", "gener")))),
)
@on_trl_ranks
def test_gradients_are_those_of_trl(name: str, tmp_path: Path) -> None:
    check_with_replicas(RUNS[name], tmp_path)


def check_with_replicas(run: Run, folder: Path) -> None:
    result, _ = compare(run, folder)
    assert result.replicas > 0, run


@pytest.mark.parametrize(
    "sizes", nightly_except([{"ep_size": 2}, {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}], {"ep_size": 2})
)
@runs_on_ranks(4, "trl")
def test_gradients_are_those_of_trl_with_experts_on_several_ranks(sizes: dict[str, int], tmp_path: Path) -> None:
    run = Run({"max_steps": 2}, sizes=sizes)
    check_with_replicas(run, tmp_path)


@pytest.mark.nightly
@on_trl_ranks
def test_gradients_of_every_loss_and_family_are_those_of_trl(tmp_path: Path) -> None:
    for loss, family in zip(LOSSES, itertools.cycle(MODEL_TYPES)):
        check_with_replicas(Run({"loss_type": loss, "max_steps": 2}, model_type=family), tmp_path)


@pytest.mark.parametrize("name", GIVEN_ROUTES)
@on_trl_ranks
def test_routes_of_rollouts_are_replayed(name: str, tmp_path: Path) -> None:
    check_with_replicas(GIVEN_ROUTES[name], tmp_path)


@on_trl_ranks
def test_gradients_are_those_of_trl_in_every_mode(tmp_path: Path) -> None:
    run = Run({"max_steps": 2})
    _, plain = train(run, tmp_path / "theirs", balanced=False)
    for mode in ("static", "shadow", "off"):
        options = {"mode": mode, "least_gain": -1.0}
        _, result = train(replace(run, session=options), tmp_path / mode, balanced=True)
        assert worst(result, plain) < TOLERANCE, options
        assert not result.replicas or mode not in ("static", "off")


@on_trl_ranks
def test_experts_compute_in_bfloat16_under_autocast(tmp_path: Path) -> None:
    run = Run({"bf16": True, "learning_rate": 1e-5}, dtype=torch.float32)
    _, plain = train(run, tmp_path / "theirs", balanced=False)
    trainer, balanced = train(run, tmp_path / "mine", balanced=True)
    assert {layer.dtype for layer in trainer.session.homes} == {torch.bfloat16}
    assert balanced.norms == pytest.approx(plain.norms, rel=0.02)


# Files.

SAVED = Run({"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_iterations": 2})


def check_weights(trainer: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trainer.model.named_parameters():
        assert relative_error(parameter.detach().full_tensor(), wanted[name]) < TOLERANCE, name


@on_trl_ranks
def test_a_resumed_run_equals_an_uninterrupted_one_and_models_are_those_of_trl(tmp_path: Path) -> None:
    """TRL's own resumes no checkpoint of a sharded model, and saves the model alone."""
    only_model = replace(SAVED, options=SAVED.options | {"save_only_model": True})
    train(only_model, tmp_path / "theirs", balanced=False)
    trainer, first = train(SAVED, tmp_path / "mine", balanced=True)
    assert first.replicas > 0
    wanted = {name: each.detach().full_tensor() for name, each in trainer.model.named_parameters()}
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "checkpoint-2", dtype=torch.float64)
        for name in ("mine", "theirs")
    ]
    for (name, one), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert relative_error(one, other) < TOLERANCE, name
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "mine" / "checkpoint-4")
    dist.barrier()
    resumed, last = train(SAVED, tmp_path / "mine", balanced=True, resume=True)
    assert len(last.gradients) == 2
    for before, after in zip(first.gradients[2:], last.gradients, strict=True):
        for name, gradient in before.items():
            assert relative_error(after[name], gradient) < TOLERANCE, name
    check_weights(resumed, wanted)


@on_trl_ranks
def test_a_saved_model_has_all_experts_in_order(tmp_path: Path) -> None:
    trainer, _ = train(Run({"max_steps": 1}), tmp_path / "run", balanced=True)
    with accelerate_ranks():
        trainer.save_model(str(tmp_path / "saved"))
    dist.barrier()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    check_weights(trainer, loaded.state_dict())


@on_trl_ranks
def test_a_model_by_its_name_trains_with_a_reference_model_and_loads_its_best_checkpoint(tmp_path: Path) -> None:
    run = {"beta": 0.2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    saves = {"save_strategy": "steps", "save_steps": 1, **best}
    trainer, result = train(Run({**run, **saves}, by_name=True), tmp_path / "mine", balanced=True)
    _, plain = train(Run(run, by_name=True), tmp_path / "theirs", balanced=False)
    assert worst(result, plain) < TOLERANCE
    whole: Any = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float64)
    check_weights(trainer, whole.state_dict())


# Weights for vLLM.


class Client:
    """A stand-in for the client of a vLLM server: it keeps what it is sent."""

    def __init__(self) -> None:
        self.pushed: list[dict[str, torch.Tensor]] = []

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.pushed.append({name: tensor.clone() for name, tensor in parameters})
        shapes = [(name, "float64", list(tensor.shape)) for name, tensor in self.pushed[-1].items()]
        assert metadata == shapes

    def reset_prefix_cache(self) -> None:
        pass


class Engine(Client):
    """A stand-in for vLLM in the process: `llm_engine...model.load_weights` takes one pair at a time."""

    def __getattr__(self, name: str) -> Any:
        return self

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        ((name, tensor),) = pairs
        if not self.pushed or name in self.pushed[-1]:
            self.pushed.append({})
        self.pushed[-1][name] = tensor.clone()


@pytest.mark.parametrize("mode", ["server", "colocate"])
@on_trl_ranks
def test_vllm_gets_the_weights_of_all_experts_in_order(mode: str, tmp_path: Path) -> None:
    pushed = []

    def connect(generation: Any) -> None:
        generation.vllm_client = generation.llm = Client() if mode == "server" else Engine()
        pushed.append(generation.vllm_client.pushed)

    def generate(generation: Any, prompts: Any, **_: Any) -> Any:
        rng = np.random.default_rng((generation.accelerator.process_index, len(pushed[-1])))
        tokens = [rng.integers(1, 15, 6).tolist() for _ in prompts]
        return prompts, tokens, [[[-2.0] for _ in each] for each in tokens], None

    def whole(generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL 1.16 pushes the shards of such models."""
        for name, parameter in generation.model.named_parameters():
            yield generation._fix_param_name_to_vllm(name), parameter.detach().full_tensor()

    run = Run({"use_vllm": True, "vllm_mode": mode, "max_steps": 2}, generates=True)
    with mock.patch.multiple(VLLMGeneration, _init_vllm=connect, generate=generate, _iter_named_params=whole):
        balanced, trainer = compare(run, tmp_path)
    # The forward for log-probabilities has recorded the routes.
    assert "moe/live_layer_calls" not in trainer.session.take_metrics() or balanced.replicas > 0
    assert len(pushed[1]) == (0 if dist.get_rank() and mode == "server" else 2)
    for theirs, mine in zip(*pushed, strict=True):
        assert list(theirs) == list(mine)
        assert max(relative_error(mine[name], theirs[name]) for name in theirs) < TOLERANCE


# Refusals.

REFUSED: dict[str, tuple[Run, dict[str, Any]]] = {
    "peft_config": (Run(), {"peft_config": object()}),
    "quantization_config": (Run(), {"quantization_config": object()}),
    "FSDP": (Run(), {}),
    "DEEPSPEED": (Run(), {}),
    "fp16=True": (Run({"fp16": True}), {}),
    "torch_compile=True": (Run({"torch_compile": True}), {}),
    "use_liger_kernel=True": (Run({"use_liger_kernel": True}), {}),
    "sync_ref_model=True": (Run({"sync_ref_model": True, "beta": 0.1}), {}),
    "use_transformers_continuous_batching=True": (Run({"use_transformers_continuous_batching": True}), {}),
    "tools and environment_factory": (Run(), {"tools": [len]}),
    "mode 'live'": (Run(session={"mode": "live"}), {}),
    "attention_dropout": (Run(changes={"attention_dropout": 0.1}), {}),
}


@pytest.mark.parametrize("name", REFUSED)
@on_trl_ranks
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    run, named = REFUSED[name]
    kind = getattr(DistributedType, name, DistributedType.NO)
    with (
        accelerate_ranks(),
        mock.patch.object(Accelerator, "distributed_type", kind),
        pytest.raises(InputError, match=name) as caught,
    ):
        make_trainer(run, tmp_path / "run", balanced=True, **named)
    assert "\n" not in str(caught.value)


@on_trl_ranks
def test_whole_models_are_refused(tmp_path: Path) -> None:
    model = random_model(small_config(Run().model_type), torch.float32)
    with accelerate_ranks(), pytest.raises(InputError, match="load it with distributed_config=DistributedConfig"):
        make_trainer(Run(), tmp_path / "run", balanced=True, model=model)


ROUTES_THAT_DO_NOT_FIT: dict[str, Callable[[list[Any]], list[Any]]] = {
    "7 entries for 8": lambda ids: ids[1:],
    "of completion 0 has shape": lambda ids: [ids[0][:-2], *ids[1:]],
}


@pytest.mark.parametrize("problem", ROUTES_THAT_DO_NOT_FIT)
@on_trl_ranks
def test_routes_that_do_not_fit_completions_are_refused(problem: str, tmp_path: Path) -> None:
    def roll_out(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = random_rollout(prompts, trainer, "random")
        return output | {"routed_experts": ROUTES_THAT_DO_NOT_FIT[problem](output["routed_experts"])}

    with accelerate_ranks(), pytest.raises(InputError, match=problem):
        make_trainer(Run(), tmp_path / "run", balanced=True, rollout_func=roll_out).train()


def test_routes_of_vllm_and_of_the_models_own_generation() -> None:
    """vLLM fills layers without experts; the model's decoder layer 1 has none."""
    torch.manual_seed(0)
    model = random_model(small_config("qwen3_moe"), torch.float32)
    prompts = torch.arange(1, 7).view(2, 3)
    with record_routing(model) as record:
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=True)
    own = rollout_routes(record.trace(tokens, torch.ones_like(prompts)), model)
    outputs = []
    for row, ids in zip(tokens.tolist(), own, strict=True):
        whole = np.zeros((len(row) - 1, 3, ids.shape[2]), np.uint8)
        whole[:, [0, 2]] = ids
        whole[2, 2] = 0
        completion = SimpleNamespace(token_ids=row[3:], routed_experts=whole)
        outputs.append(SimpleNamespace(prompt_token_ids=row[:3], outputs=[completion]))
    for ids, found in zip(own, rollout_routes(outputs, model), strict=True):
        ids[2, 1] = -1
        assert np.array_equal(ids, found)
