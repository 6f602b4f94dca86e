"""TRL's GRPO trainer with balanced experts equals TRL's own; its files, pushed weights and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

from helpers.equality import relative_error
from helpers.moe_families import MODEL_TYPES, random_model, small_config
from helpers.rank_pool import on_ranks
from helpers.trl_runs import (
    Run,
    accelerate_ranks,
    make_trainer,
    random_rollout,
    train,
    worst,
)
from trimtab import InputError

# In float64.
TOLERANCE = 1e-12

CHECKPOINTED = {"gradient_checkpointing": True}
RUNS = {
    "accumulation": Run(),
    "iterations, checkpointing": Run({"num_iterations": 2, **CHECKPOINTED}),
    "reentrant checkpointing": Run({**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "two updates to a generation": Run({"steps_per_generation": 4}),
    "two generations to an update": Run({"steps_per_generation": 2, "gradient_accumulation_steps": 4}),
    "short last update of an epoch": Run(
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "max_steps": 4}, prompts=14
    ),
    "auxiliary loss": Run({"router_aux_loss_coef": 0.1, "beta": 0.0}),
    "entropy": Run({"entropy_coef": 0.1, "top_entropy_quantile": 0.5}),
    "no clipping, truncated completions": Run({"max_grad_norm": 0.0, "mask_truncated_completions": True}),
    "generation, evaluation": Run({"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}, generates=True),
}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
GIVEN_ROUTES = {
    "all": Run({"num_iterations": 2}, routes="random"),
    "unknown ones, and not of last tokens": Run({"steps_per_generation": 4}, routes="short"),
    "with the auxiliary loss": Run({"router_aux_loss_coef": 0.1}, routes="short"),
}


def compare(runs: Sequence[Run], folder: Path) -> list[tuple[float, int, int]]:
    """For each run the worst difference, and the numbers of replicas and moves."""
    found = []
    for run in runs:
        _, plain = train(run, folder, balanced=False)
        _, balanced = train(run, folder, balanced=True)
        found.append((worst(balanced, plain), balanced.replicas, balanced.moved))
    return found


def check(runs: Sequence[Run], folder: Path, ranks: int) -> None:
    for results in on_ranks(compare, (runs, folder), ranks=ranks, patched="trl"):
        for run, (error, replicas, moved) in zip(runs, results, strict=True):
            assert error < TOLERANCE, run
            assert ranks == 1 or (replicas > 0 and moved > 0), run


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_trl(name: str, tmp_path: Path) -> None:
    check([RUNS[name]], tmp_path, ranks=2)


def test_gradients_are_those_of_trl_on_one_rank(tmp_path: Path) -> None:
    check([RUNS["iterations, checkpointing"], RUNS["two updates to a generation"]], tmp_path, ranks=1)


def test_gradients_of_every_loss_are_those_of_trl(tmp_path: Path) -> None:
    check([Run({"loss_type": loss, "max_steps": 2}) for loss in LOSSES], tmp_path, ranks=2)


@pytest.mark.parametrize("name", GIVEN_ROUTES)
def test_routes_of_rollouts_are_replayed(name: str, tmp_path: Path) -> None:
    check([GIVEN_ROUTES[name]], tmp_path, ranks=2)


def test_gradients_of_every_family_are_those_of_trl(tmp_path: Path) -> None:
    others = [kind for kind in MODEL_TYPES if kind != Run().model_type]
    check([Run({"max_steps": 2}, model_type=kind) for kind in others], tmp_path, ranks=2)


@pytest.mark.parametrize("mode", ["rehome", "static", "shadow", "off"])
def test_gradients_are_those_of_trl_in_every_mode(mode: str, tmp_path: Path) -> None:
    run = Run({"max_steps": 2}, session={"mode": mode, "least_gain": -1.0})
    for ((error, replicas, _),) in on_ranks(compare, ([run], tmp_path), ranks=2, patched="trl"):
        assert error < TOLERANCE
        assert not replicas or mode == "shadow"


def test_gradients_are_those_of_trl_in_two_groups(tmp_path: Path) -> None:
    for ((error, _, _),) in on_ranks(compare, ([Run(session={"groups": 2})], tmp_path), ranks=2, patched="trl"):
        assert error < TOLERANCE


def norms(folder: Path) -> tuple[list[float], list[float], bool]:
    run = Run({"bf16": True, "learning_rate": 1e-5}, dtype=torch.float32)
    _, plain = train(run, folder, balanced=False)
    trainer, balanced = train(run, folder, balanced=True)
    return plain.norms, balanced.norms, {layer.dtype for layer in trainer.session.homes} == {torch.bfloat16}


def test_experts_compute_in_bfloat16_under_autocast(tmp_path: Path) -> None:
    for plain, balanced, is_bfloat16 in on_ranks(norms, (tmp_path,), ranks=2, patched="trl"):
        assert is_bfloat16
        assert balanced == pytest.approx(plain, rel=0.02)


# Files.

SAVED = Run({"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_iterations": 2})


def only_first_checkpoint(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-4")
    dist.barrier()


def save_and_resume(folder: Path) -> None:
    mine, theirs = folder / "mine", folder / "theirs"
    plain, _ = train(SAVED, theirs, balanced=False)
    trainer, first = train(SAVED, mine, balanced=True)
    assert first.moved > 0
    wanted, state = plain.model.state_dict(), trainer.session.logical_state_dict(trainer.model)
    assert max(relative_error(state[name], wanted[name]) for name in wanted) < TOLERANCE

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
    state = resumed.session.logical_state_dict(resumed.model)
    assert max(relative_error(state[name], wanted[name]) for name in wanted) < TOLERANCE

    only_first_checkpoint(theirs)
    resumed, _ = train(SAVED, theirs, balanced=True, resume=True)
    state = resumed.session.logical_state_dict(resumed.model)
    assert max(relative_error(state[name], wanted[name]) for name in wanted) < TOLERANCE


def test_checkpoints_are_those_of_trl_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    on_ranks(save_and_resume, (tmp_path,), ranks=2, patched="trl")


def save_by_hand(folder: Path) -> None:
    trainer, result = train(Run({"max_steps": 1}), folder, balanced=True)
    assert result.moved > 0
    with pytest.raises(InputError, match=r"trainer\.save_model"):
        trainer.model.save_pretrained(folder / "rank")
    with accelerate_ranks():
        trainer.save_model(str(folder / "saved"))
    state = trainer.session.logical_state_dict(trainer.model)
    dist.barrier()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_a_saved_model_has_all_experts_in_order(tmp_path: Path) -> None:
    on_ranks(save_by_hand, (tmp_path,), ranks=2, patched="trl")


def train_from_path(folder: Path) -> list[float]:
    """A model of a path, with a reference model, and the best checkpoint at the end."""
    if dist.get_rank() == 0:
        with accelerate_ranks():
            make_trainer(Run(), folder, balanced=False).model.save_pretrained(folder / "start")
    dist.barrier()
    changes = {"model_init_kwargs": {"dtype": torch.float64, "experts_implementation": "eager"}, "beta": 0.2}
    saves = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    run = Run({**changes, **saves, **best}, path=str(folder / "start"))
    _, plain = train(run, folder / "theirs", balanced=False)
    trainer, balanced = train(run, folder / "mine", balanced=True)
    whole: Any = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float64)
    state = trainer.session.logical_state_dict(trainer.model)
    errors = [relative_error(state[name], value) for name, value in whole.state_dict().items()]
    return [worst(balanced, plain), max(errors)]


def test_a_model_of_a_path_trains_with_a_reference_model_and_loads_its_best_checkpoint(tmp_path: Path) -> None:
    for errors in on_ranks(train_from_path, (tmp_path,), ranks=2, patched="trl"):
        assert max(errors) < TOLERANCE


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


def push(mode: str, folder: Path) -> tuple[float, float, int]:
    """The worst differences of gradients and of weights that vLLM gets, and the number of pushes."""
    pushed = []
    errors = []

    def connect(generation: Any) -> None:
        generation.vllm_client = generation.llm = Client() if mode == "server" else Engine()
        pushed.append(generation.vllm_client.pushed)

    def generate(generation: Any, prompts: Any, **_: Any) -> Any:
        rng = np.random.default_rng((generation.accelerator.process_index, len(pushed[-1])))
        tokens = [rng.integers(1, 15, 6).tolist() for _ in prompts]
        return prompts, tokens, [[[-2.0] for _ in each] for each in tokens], None

    run = Run({"use_vllm": True, "vllm_mode": mode, "max_steps": 3}, generates=True)
    with mock.patch.multiple(VLLMGeneration, _init_vllm=connect, generate=generate):
        _, plain = train(run, folder, balanced=False)
        trainer, balanced = train(run, folder, balanced=True)
    # The forward for log-probabilities has recorded the routes.
    assert "moe/live_layer_calls" not in trainer.session.take_metrics() or balanced.moved > 0
    for theirs, mine in zip(*pushed, strict=True):
        assert list(theirs) == list(mine)
        errors += [relative_error(mine[name], theirs[name]) for name in theirs]
    return worst(balanced, plain), max(errors, default=0.0), len(pushed[1])


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_vllm_gets_the_weights_of_all_experts_in_order(mode: str, tmp_path: Path) -> None:
    for rank, (error, pushed_error, count) in enumerate(on_ranks(push, (mode, tmp_path), ranks=2, patched="trl")):
        assert max(error, pushed_error) < TOLERANCE
        assert count == (0 if rank and mode == "server" else 3)


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


def refuse(name: str, folder: Path) -> str:
    run, named = REFUSED[name]
    kind = getattr(DistributedType, name, DistributedType.NO)
    with accelerate_ranks(), mock.patch.object(Accelerator, "distributed_type", kind):
        try:
            make_trainer(run, folder, balanced=True, **named)
        except InputError as error:
            return str(error)
    return "not refused"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (message,) = on_ranks(refuse, (name, tmp_path), ranks=1, patched="trl")
    assert name in message
    assert "\n" not in message


def with_weights_of_its_own(folder: Path) -> str:
    with accelerate_ranks():
        torch.manual_seed(3)
        model = random_model(small_config(Run().model_type), torch.float32)
        if dist.get_rank():
            next(iter(model.parameters())).data.neg_()
        try:
            make_trainer(Run(), folder, balanced=True, model=model)
        except InputError as error:
            return str(error)
    return "not refused"


def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    for message in on_ranks(with_weights_of_its_own, (tmp_path,), ranks=2, patched="trl"):
        assert "the model of rank 1 has other weights than that of rank 0" in message


def with_routes(change: Callable[[list[Any]], Any], prompts: Any, trainer: Any) -> dict[str, Any]:
    output = random_rollout(prompts, trainer, "random")
    output["routed_experts"] = change(output["routed_experts"])
    return output


def drop_one(ids: list[Any]) -> list[Any]:
    return ids[1:]


def shorten(ids: list[Any]) -> list[Any]:
    return [ids[0][:-2], *ids[1:]]


def train_with(change: Callable[[list[Any]], Any], folder: Path) -> str:
    with accelerate_ranks():
        trainer = make_trainer(Run(), folder, balanced=True, rollout_func=partial(with_routes, change))
        try:
            trainer.train()
        except InputError as error:
            return str(error)
    return "not refused"


@pytest.mark.parametrize(("change", "problem"), [(drop_one, "7 entries for 8"), (shorten, "of completion 0 has shape")])
def test_routes_that_do_not_fit_completions_are_refused(
    change: Callable[[list[Any]], Any], problem: str, tmp_path: Path
) -> None:
    (message,) = on_ranks(train_with, (change, tmp_path), ranks=1, patched="trl")
    assert problem in message
