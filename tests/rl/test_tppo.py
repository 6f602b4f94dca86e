"""T-PPO on two ranks: gradients of a plain single-process T-PPO, equal losses, resume in the middle of a response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.rank_pool import RankPool
from helpers.trainers import (
    LOG_RATIO,
    PlainValues,
    compare_gradients,
    make_folder,
    make_sequences,
    save_and_resume,
    start,
)
from trimtab.rl.algorithm import TokenOutputs, TrainedTokens
from trimtab.rl.batches import collate
from trimtab.rl.config import PrefixRouting, ValueModelName
from trimtab.rl.demo_model import load_model
from trimtab.rl.ppo import GAE_LAMBDA
from trimtab.rl.sequences import Sequence
from trimtab.rl.step_metrics import StepClock
from trimtab.rl.tppo import TPPO
from trimtab.rl.value_head import ValueHead
from trimtab.rl.windows import Windows
from trimtab.trace import read_trace

State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tppo"))


def partly_trained(count: int) -> list[Sequence]:
    """Complete and incomplete sequences, some of which were trained on in parts."""
    rng = np.random.default_rng(6)
    found = []
    for index, sequence in enumerate(make_sequences(count, hot=True)):
        known = int(rng.integers(0, sequence.response_length))
        # The last known token was not trained.
        versions = np.where(np.arange(sequence.num_fed) < sequence.prompt_length - 1 + known, 3 - index % 3, 4)
        is_finished = index % 3 > 0
        found.append(
            replace(
                sequence,
                reward=float(rng.random()) if is_finished else 0.0,
                is_finished=is_finished,
                trained_tokens=max(0, known - 1),
                row_versions=versions.astype(np.int32),
                log_probs=-3 + rng.random(sequence.response_length).astype(np.float32),
            )
        )
    return [sequence for sequence in found if sequence.policy_tokens or sequence.value_tokens]


def plain_loss(model: Any, value_model: PlainValues, sequences: list[Sequence]) -> torch.Tensor:
    """The loss of T-PPO, from its definition, of a whole model that routes by itself."""
    policy, value = torch.zeros(()), torch.zeros(())
    policy_tokens = value_tokens = 0
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.token_ids)
        first, length = sequence.prompt_length - 1, sequence.response_length
        hidden = model.model(tokens[None, :-1]).last_hidden_state[0]
        log_probs = model.lm_head(hidden[first:]).log_softmax(-1)[range(length), tokens[sequence.prompt_length :]]
        values = value_model(tokens[:-1], hidden)[first:]
        after = [*values.tolist()[1:], sequence.reward if sequence.is_finished else float(values[-1])]
        deltas = np.array(after) - values.tolist()
        assert sequence.row_versions is not None
        versions = sequence.row_versions[first:]
        for t in range(sequence.trained_tokens, length if sequence.is_finished else length - 1):
            is_new = versions[t] == versions[-1]
            old = log_probs[t].detach() - LOG_RATIO if is_new else torch.tensor(sequence.log_probs[t])
            ratio = (log_probs[t] - old).exp()
            advantage = sum(GAE_LAMBDA ** (k - t) * deltas[k] for k in range(t, length))
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            policy_tokens += 1
        if sequence.is_finished:
            # Nothing is clipped when the values have not changed.
            value = value + 0.5 * ((values - sequence.reward) ** 2).sum()
            value_tokens += length
    return policy / policy_tokens + value / value_tokens


def check_gradients(state: State, folder: Path, mode: str, value_model: str) -> None:
    given: dict[str, Any] = {"mini_batches": 1, "mode": mode, "value_model": value_model}
    if value_model == "trunk":
        given |= {"slots": 2, "gradient_checkpointing": mode == "plan"}
    trainer = start(folder, algorithm="t-ppo", **given)
    model: Any = load_model(folder / "model", trainer.model_config, torch.float32)
    windows = Windows(8, window=3, max_new_tokens=8, seed=2)
    both: list[Any] = [[sequence for step in range(3) for sequence in windows.advance(model, trainer.tokenizer, step)]]
    dist.broadcast_object_list(both)
    rng = np.random.default_rng(8)
    sequences = [replace(s, reward=float(rng.random())) if s.is_finished else s for s in both[0]]
    # Windows whose policy differs from that of now.
    sequences = [replace(s, log_probs=s.log_probs - rng.normal(size=s.response_length) * 0.1) for s in sequences]
    assert any(s.is_finished and s.trained_tokens for s in sequences)
    assert any(not s.is_finished and s.trained_tokens for s in sequences)
    compare_gradients(trainer, model, sequences, plain_loss)
    trainer.close()


@pytest.mark.parametrize("value_model", get_args(ValueModelName))
@pytest.mark.parametrize("mode", ["plan", "off"])
def test_gradients_equal_those_of_a_plain_tppo(pool: RankPool, folder: Path, mode: str, value_model: str) -> None:
    pool.call(check_gradients, folder, mode, value_model)


def train_some_steps(state: State, folder: Path, mode: str) -> list[dict[str, float]]:
    trainer = start(folder, algorithm="t-ppo", mode=mode, learning_rate=1e-3)
    found = []
    for step in range(3):
        _, metrics = trainer.train(partly_trained(16)[trainer.rank :: 2], step, StepClock())
        found.append(
            {name: metrics[name] for name in metrics if name.startswith(("loss", "ppo", "value", "grad", "tok"))}
        )
    trainer.close()
    return found


def test_balanced_and_unbalanced_runs_have_the_same_losses(pool: RankPool, folder: Path) -> None:
    planned, static, off = (pool.call(train_some_steps, folder, mode)[0] for mode in ("plan", "static", "off"))
    for other in (static, off):
        for one, two in zip(planned, other, strict=True):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    sequences = partly_trained(16)
    assert planned[0]["tokens/computed"] == sum(len(s.expert_ids) for s in sequences)
    assert planned[0]["tokens/trained"] == sum(
        s.response_length - s.trained_tokens - (not s.is_finished) for s in sequences
    )


def test_figures_by_age_are_of_the_policy_before_the_step() -> None:
    batch = collate(partly_trained(16), pad_token_id=0, device=torch.device("cpu"))
    drift = torch.tensor([0.01, 0.5, -0.1])[batch.ages.clamp(max=2)]
    old_log_probs = (batch.rollout_log_probs + drift) * batch.response_mask
    value_model = ValueHead(4, 0, torch.device("cpu"))
    tppo = TPPO(value_model, Windows(1, window=2, max_new_tokens=4, seed=0))
    outputs = TokenOutputs(old_log_probs * batch.policy_mask, torch.zeros(*batch.targets.shape, 4))
    batch = tppo.with_targets(batch, outputs)
    found = tppo.metrics(tppo.loss(batch, outputs, old_log_probs, TrainedTokens(1, 1)).sums)
    for age, shift in (("0", 0.01), ("1", 0.5), ("2_or_more", -0.1)):
        assert found[f"ppo/kl_age_{age}"] == pytest.approx(np.exp(shift) - 1 - shift, rel=1e-3)
        assert found[f"ppo/clip_fraction_age_{age}"] == (age == "1")


def compare_prefix_routing(state: State, folder: Path) -> dict[str, float]:
    """Differences to the rollout after the weights have changed in the middle of responses; all other rows differ."""
    trainer = start(folder, algorithm="t-ppo", window=2, max_new_tokens=8, problems=12)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        # A model whose log-probabilities depend on its experts.
        for name, parameter in trainer.model.named_parameters():
            parameter.mul_({"down_proj": 6, "lm_head": 4}.get(name.rsplit(".", 2)[-1].removesuffix(".weight"), 1))
    trainer.sync_rollout()
    trainer.rollout(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "gate.weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 2)
    trainer.sync_rollout()
    old = [sequence for sequence in trainer.rollout(1) if sequence.rebuilt_ids is not None]
    found = {}
    for routing in get_args(PrefixRouting):
        trainer.config = replace(trainer.config, prefix_routing=routing)
        prepared = trainer.prepare(old, 1)
        assert prepared.planned is not None
        trainer.session.apply_plan(prepared.planned, prepared.trace)
        found[routing] = trainer.rollout_difference(prepared, trainer.recompute(prepared))
        unknown = (prepared.trace.expert_ids == prepared.trace.no_route).all(axis=(1, 2))
        versions = np.concatenate([prepared.trace.row_versions(s) for s in range(prepared.trace.num_sequences)])
        assert unknown.tolist() == ((versions == 0) & (routing == "live")).tolist()
        assert {len(windows) for windows in prepared.trace.windows} == {2}
    trainer.close()
    return found


def test_recorded_prefixes_differ_from_the_rebuilt_cache(pool: RankPool, folder: Path) -> None:
    for found in pool.call(compare_prefix_routing, folder):
        assert 0 < found["rebuilt"] < 0.1
        assert found["live"] < found["recorded"] / 2
        assert found["rebuilt"] < found["recorded"] / 2


def count_logits(state: State, folder: Path) -> None:
    trainer = start(folder, algorithm="t-ppo", mode="off")
    head = trainer.model.get_output_embeddings()
    rows: list[int] = []
    hook = head.register_forward_hook(lambda _module, args, _output: rows.append(len(args[0])))
    sequences = partly_trained(16)
    prepared = trainer.prepare(sequences[trainer.rank :: 2], 0)
    assert prepared.planned is not None
    trainer.session.apply_plan(prepared.planned, prepared.trace)
    old_log_probs = trainer.recompute(prepared)
    recomputed, updates = sum(rows), len(rows)
    trainer.update(prepared, old_log_probs, 0)
    hook.remove()
    totals: list[Any] = [None, None]
    dist.all_gather_object(totals, (recomputed, sum(rows[updates:])))
    assert sum(total for total, _ in totals) == sum(sequence.response_length for sequence in sequences)
    assert sum(total for _, total in totals) == sum(sequence.policy_tokens for sequence in sequences)
    trainer.close()


def test_only_tokens_of_a_loss_have_logits(pool: RankPool, folder: Path) -> None:
    pool.call(count_logits, folder)


def resume(state: State, folder: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "t-ppo", "window": 2, "max_new_tokens": 7, "learning_rate": 1e-3}
    trainer = start(folder, **settings)
    (folder / "out" / "routing").mkdir(exist_ok=True)
    windows: Any = trainer.algorithm.windows
    for step in range(2):
        trainer.step(step)
    again = save_and_resume(trainer, 2)
    again.session.settings.least_gain = trainer.session.settings.least_gain
    trace = read_trace(folder / "out" / "routing" / "step-00001.parquet")
    assert {len(windows) for windows in trace.windows} == {0, 2}
    # In the middle of responses.
    assert any(len(set(response.row_versions.tolist())) == 2 for response in windows.open)
    for step in (2, 3):
        straight, resumed = (
            {name: value for name, value in each.step(step).items() if not name.endswith(("_s", "_bytes"))}
            for each in (trainer, again)
        )
        assert straight == resumed
    states = [each.algorithm_state() for each in (trainer, again)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    expected = trainer.session.logical_state_dict(trainer.model)
    for name, value in again.session.logical_state_dict(again.model).items():
        assert torch.equal(value, expected[name]), name
    for each in (trainer, again):
        each.close()


def test_a_run_resumes_in_the_middle_of_responses_bit_for_bit(pool: RankPool, folder: Path) -> None:
    pool.call(resume, folder)
