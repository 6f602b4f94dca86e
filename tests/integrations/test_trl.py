"""TRL's GRPO trainer with balanced experts equals TRL's own; its files, pushed weights and refusals."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
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

from helpers.accelerator import LAZY
from helpers.equality import relative_error
from helpers.examples import nightly_except
from helpers.moe_families import MODEL_TYPES, random_model, small_config
from helpers.rank_tests import runs_on_ranks
from helpers.trl_runs import Result, Run, accelerate_ranks, make_trainer, random_rollout, train, worst
from trimtab import InputError

# In float64.
TOLERANCE = 1e-12

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
    ("name", "ways"),
    nightly_except(
        [*((name, "") for name in RUNS), ("reentrant checkpointing", LAZY)],
        *((name, "") for name in RUNS if name not in ("iterations, checkpointing", "two generations to an update")),
    ),
)
@on_trl_ranks
def test_gradients_are_those_of_trl(name: str, ways: str, tmp_path: Path) -> None:
    check_with_replicas(RUNS[name], tmp_path)


def check_with_replicas(run: Run, folder: Path) -> None:
    result, _ = compare(run, folder)
    assert result.replicas > 0, run


@runs_on_ranks(1, "trl")
def test_gradients_are_those_of_trl_on_one_rank(tmp_path: Path) -> None:
    compare(RUNS["iterations, checkpointing"], tmp_path)


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
def test_gradients_are_those_of_trl_in_every_mode_and_two_groups(tmp_path: Path) -> None:
    run = Run({"max_steps": 2})
    _, plain = train(run, tmp_path, balanced=False)
    modes: list[dict[str, Any]] = [{"mode": mode, "least_gain": -1.0} for mode in ("static", "shadow", "off")]
    for options in (*modes, {"groups": 2}):
        _, result = train(replace(run, session=options), tmp_path, balanced=True)
        assert worst(result, plain) < TOLERANCE, options
        assert not result.replicas or options.get("mode") not in ("static", "off")


@on_trl_ranks
def test_experts_compute_in_bfloat16_under_autocast(tmp_path: Path) -> None:
    run = Run({"bf16": True, "learning_rate": 1e-5}, dtype=torch.float32)
    _, plain = train(run, tmp_path, balanced=False)
    trainer, balanced = train(run, tmp_path, balanced=True)
    assert {layer.dtype for layer in trainer.session.homes} == {torch.bfloat16}
    assert balanced.norms == pytest.approx(plain.norms, rel=0.02)


# Files.

SAVED = Run({"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_iterations": 2})


def only_first_checkpoint(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-4")
    dist.barrier()


def check_weights(trainer: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    state = trainer.session.whole_state_dict(trainer.model)
    assert max(relative_error(state[name], value) for name, value in wanted.items()) < TOLERANCE


@on_trl_ranks
def test_checkpoints_are_those_of_trl_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    plain, _ = train(SAVED, theirs, balanced=False)
    trainer, first = train(SAVED, mine, balanced=True)
    assert first.replicas > 0
    wanted = plain.model.state_dict()
    check_weights(trainer, wanted)

    # The files of TRL's own run: names, weights, optimizer state.
    first_of = [path / "checkpoint-2" for path in (mine, theirs)]
    assert {path.name for path in first_of[0].iterdir()} == {path.name for path in first_of[1].iterdir()}
    packed, expected = (torch.load(path / "optimizer.pt") for path in first_of)
    assert packed["param_groups"] == expected["param_groups"]
    assert packed["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert packed["state"][number].keys() == values.keys()
        for key, value in values.items():
            assert relative_error(packed["state"][number][key], value) < TOLERANCE, (number, key)
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in first_of]
    tokens = torch.arange(1, 13)[None]
    with torch.no_grad():
        logits = [model.set_experts_implementation("eager") or model(tokens).logits for model in models]
    assert relative_error(*logits) < TOLERANCE

    only_first_checkpoint(mine)
    resumed, last = train(SAVED, mine, balanced=True, resume=True)
    assert len(last.gradients) == 2
    for before, after in zip(first.gradients[2:], last.gradients, strict=True):
        # Homes differ, so rows do; other parameters are on all ranks.
        for name in (name for name in before if "experts" not in name):
            assert relative_error(after[name][0], before[name][0]) < TOLERANCE, name
    check_weights(resumed, wanted)

    only_first_checkpoint(theirs)
    resumed, _ = train(SAVED, theirs, balanced=True, resume=True)
    check_weights(resumed, wanted)


@on_trl_ranks
def test_a_saved_model_has_all_experts_in_order(tmp_path: Path) -> None:
    trainer, _ = train(Run({"max_steps": 1}), tmp_path, balanced=True)
    with pytest.raises(InputError, match=r"trainer\.save_model"):
        trainer.model.save_pretrained(tmp_path / "rank")
    with accelerate_ranks():
        trainer.save_model(str(tmp_path / "saved"))
    state = trainer.session.whole_state_dict(trainer.model)
    dist.barrier()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@on_trl_ranks
def test_a_model_of_a_path_trains_with_a_reference_model_and_loads_its_best_checkpoint(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        with accelerate_ranks():
            make_trainer(Run(), tmp_path, balanced=False).model.save_pretrained(tmp_path / "start")
    dist.barrier()
    changes = {"model_init_kwargs": {"dtype": torch.float64, "experts_implementation": "eager"}, "beta": 0.2}
    saves = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    _, trainer = compare(Run({**changes, **saves, **best}, path=str(tmp_path / "start")), tmp_path)
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

    run = Run({"use_vllm": True, "vllm_mode": mode, "max_steps": 2}, generates=True)
    with mock.patch.multiple(VLLMGeneration, _init_vllm=connect, generate=generate):
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
    "optimizers": (Run(), {"optimizers": (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), None)}),
    "FSDP": (Run(), {}),
    "DEEPSPEED": (Run(), {}),
    "fp16=True": (Run({"fp16": True}), {}),
    "optim='adafactor'": (Run({"optim": "adafactor"}), {}),
    "torch_compile=True": (Run({"torch_compile": True}), {}),
    "use_liger_kernel=True": (Run({"use_liger_kernel": True}), {}),
    "sync_ref_model=True": (Run({"sync_ref_model": True, "beta": 0.1}), {}),
    "use_transformers_continuous_batching=True": (Run({"use_transformers_continuous_batching": True}), {}),
    "tools and environment_factory": (Run(), {"tools": [len]}),
    "mode 'live'": (Run(session={"mode": "live"}), {}),
    "attention_dropout": (Run(changes={"attention_dropout": 0.1}), {}),
}


@pytest.mark.parametrize("name", REFUSED)
@runs_on_ranks(1, "trl")
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    run, named = REFUSED[name]
    kind = getattr(DistributedType, name, DistributedType.NO)
    with (
        accelerate_ranks(),
        mock.patch.object(Accelerator, "distributed_type", kind),
        pytest.raises(InputError, match=name) as caught,
    ):
        make_trainer(run, tmp_path, balanced=True, **named)
    assert "\n" not in str(caught.value)


@on_trl_ranks
def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = random_model(small_config(Run().model_type), torch.float32)
    if dist.get_rank():
        next(iter(model.parameters())).data.neg_()
    with accelerate_ranks(), pytest.raises(InputError, match="rank 1 has other weights than that of rank 0"):
        make_trainer(Run(), tmp_path, balanced=True, model=model)


ROUTES_THAT_DO_NOT_FIT: dict[str, Callable[[list[Any]], list[Any]]] = {
    "7 entries for 8": lambda ids: ids[1:],
    "of completion 0 has shape": lambda ids: [ids[0][:-2], *ids[1:]],
}


@pytest.mark.parametrize("problem", ROUTES_THAT_DO_NOT_FIT)
@runs_on_ranks(1, "trl")
def test_routes_that_do_not_fit_completions_are_refused(problem: str, tmp_path: Path) -> None:
    def roll_out(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = random_rollout(prompts, trainer, "random")
        return output | {"routed_experts": ROUTES_THAT_DO_NOT_FIT[problem](output["routed_experts"])}

    with accelerate_ranks(), pytest.raises(InputError, match=problem):
        make_trainer(Run(), tmp_path, balanced=True, rollout_func=roll_out).train()
