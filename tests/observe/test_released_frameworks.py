"""The recipes of `docs/observe.md` with released frameworks: TRL 1.16, and verl 0.9.1 where it is installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from helpers.framework_batches import EXPERTS, MODEL, PROMPT, random_sequences
from helpers.rank_pool import on_ranks
from trimtab.trace import RoutingTrace, read_trace

EXAMPLES = Path(__file__).parents[2] / "examples"


def in_order(trace: RoutingTrace) -> list[Any]:
    return sorted(trace.sequence(s).tolist() for s in range(trace.num_sequences))


def train_with_trl(folder: Path) -> tuple[list[Any], dict[str, float]]:
    """The routes that TRL's own trainer was given, and the last figures."""
    from helpers.trl_runs import Run, accelerate_ranks, make_trainer, random_rollout
    from trimtab.observe import Observer

    given: list[Any] = []
    observer = Observer("trl", ranks=2, num_experts=EXPERTS, folder=folder, rank=0)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = random_rollout(prompts, trainer, "random")
        observer.record(output, trainer.state.global_step)
        given.extend(np.sort(np.asarray(ids), axis=2).tolist() for ids in output["routed_experts"])
        return output

    with accelerate_ranks():
        make_trainer(Run(), folder / "trainer", balanced=False, rollout_func=rollout).train()
    observer.close()
    return given, observer.metrics()


@pytest.mark.slow
def test_trl_s_trainer_is_observed_from_its_rollout_function(tmp_path: Path) -> None:
    ((given, figures),) = on_ranks(train_with_trl, (tmp_path,), ranks=1, patched="trl")
    trace = read_trace(sorted(tmp_path.glob("*.parquet")))
    lengths = [len(ids) for ids in given]
    assert sorted(trace.sequence_lengths.tolist()) in (sorted(lengths), sorted(length - 1 for length in lengths))
    assert figures["moe/observed_share"] == 1
    assert len(set(trace.steps.tolist())) > 1


class Queue(ModuleType):
    """TransferQueue, as far as verl's replay buffer needs it to be imported, and the recipe to fetch."""

    KVBatchMeta = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.values: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        import torch
        from tensordict import TensorDict

        assert partition_id == "train"
        columns = {
            name: torch.nested.as_nested_tensor([self.values[key][name] for key in keys], layout=torch.jagged)
            for name in select_fields
        }
        return TensorDict(columns, batch_size=len(keys))


def test_verl_s_sampler_is_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    queue = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    recipe = importlib.import_module("observe_verl")
    options = {"model": MODEL, "ranks": 4, "folder": tmp_path}
    observer = recipe.Observer("verl", **options)
    make = mock.Mock(return_value=observer)
    monkeypatch.setattr(recipe, "Observer", make)
    sequences = random_sequences(np.random.default_rng(4), 10)
    for number, ids in enumerate(sequences):
        output = AgentLoopOutput(
            prompt_ids=[1] * PROMPT, response_ids=[2] * (len(ids) + 1 - PROMPT),
            response_mask=[1] * (len(ids) + 1 - PROMPT), routed_experts=ids, metrics=AgentLoopMetrics(),
        )  # fmt: skip
        queue.values[f"uid_0_{number}"] = output.as_dict()

    base = recipe.ObservedReplayBuffer.__mro__[1]
    meta = SimpleNamespace(keys=list(queue.values), partition_id="train")
    monkeypatch.setattr(base, "sample", lambda self, global_steps, partition_id, batch_size: (meta, {"kept": 1}))
    buffer = recipe.ObservedReplayBuffer(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=None, max_off_policy_strategy="drop",
        sampler_kwargs={"observe": options}, refill_fn=None,
    )  # fmt: skip
    make.assert_called_once_with("verl", **options)
    assert buffer.sample(global_steps=1, partition_id="train", batch_size=10) == (meta, {"kept": 1})
    assert observer.flush(300)
    _, metrics = buffer.sample(global_steps=2, partition_id="train", batch_size=10)
    assert metrics["rollout/moe/step"] == 1
    assert metrics["rollout/moe/observed_share"] == 1
    assert {"kept", "rollout/moe/max_vio", "timing_s/moe_observe"} <= metrics.keys()
    buffer.sample(global_steps=3, partition_id="val", batch_size=10)
    observer.close()
    trace = read_trace(tmp_path)
    assert trace.num_sequences == 20
    first = trace.select(np.flatnonzero(trace.steps == 1))
    assert in_order(first) == sorted(np.sort(ids, axis=2).tolist() for ids in sequences)


def test_verl_s_padded_batches_are_observed(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    import torch
    from verl.protocol import DataProto

    from helpers.framework_batches import verl
    from trimtab.observe import Observer

    sequences = random_sequences(np.random.default_rng(5), 8)
    made = verl(sequences)
    batch = DataProto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in made.batch.items()}, non_tensors=made.non_tensor_batch
    )
    batch.reorder(torch.randperm(len(sequences)))
    with Observer("verl", model=MODEL, ranks=4, folder=tmp_path) as observer:
        observer.record(batch, 0)
    trace = read_trace(tmp_path)
    assert in_order(trace) == sorted(np.sort(ids, axis=2).tolist() for ids in sequences)
    assert set(trace.domains.tolist()) == {"math"}
