"""`python -m recipes.rl.train`: train a small MoE by RL on local ranks or under torchrun, balanced by Trimtab.

A supervised warm start on several tasks, then RL on one of them. Recompute and update replay the rollout's routing
under the plan. At the end a second trainer without balancing trains further steps beside the run's, to compare times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import track
from torch.utils.tensorboard.writer import SummaryWriter

from recipes.rl import task
from recipes.rl.batches import Loss, MicroBatch, Outputs, TrainedTokens, collate, policy_loss, token_log_probs
from recipes.rl.checkpoint import Checkpoint, last_checkpoint, last_folder, step_of, write_checkpoint
from recipes.rl.compare import compare_policies, show_results
from recipes.rl.config import TrainConfig, add_to, resumed
from recipes.rl.responses import Response, count_solved, encode, gather, generate, response_draws, sample_groups
from recipes.rl.t_ppo import PPO, ValueHead, ValueTrunk, Windows
from trimtab.cli.main import run as run_command
from trimtab.cli.options import given
from trimtab.cli.parser import Parser
from trimtab.console import console
from trimtab.errors import InputError
from trimtab.files import write_atomically
from trimtab.integrations.transformers import distribute_experts, moe_blocks, num_experts
from trimtab.integrations.transformers.families import router_of
from trimtab.launch import launch
from trimtab.planner import Placement, Schedule, pack_by_length
from trimtab.rank_variables import rank_variable, torchrun_ranks
from trimtab.runtime import MicroStep, PlannedStep, Session
from trimtab.runtime.step_planner import default_rates
from trimtab.trace import RoutingTrace, hash_tokens, write_trace

WARM_UP_STEPS = 3
MAX_NORM = 1.0
WARM_START_LEARNING_RATE = 2e-3
# The default of `router_aux_loss_coef` in transformers. Experts may specialise.
BALANCE_WEIGHT = 0.001
HEADER = "step  reward         max_vio  replicas      plan  rollout  recompute   update"
LINE = (
    "{step:>4}  {reward:>6.3f}  {moe/max_vio_before:.3f} -> {moe/max_vio_after:.3f}  {moe/replicas:>8}  "
    "{plan_ms:>5.1f} ms  {rollout_s:>5.2f} s  {recompute_s:>7.2f} s  {update_s:>5.2f} s"
)


class GRPO:
    """Group-relative policy optimization (arXiv 2402.03300): advantages from the rollout, no value model.

    A loss is a sum over tokens divided by a constant that is known before the step, so that every grouping of responses
    into micro-batches gives the same gradients. `PPO` and `TPPO` have the same methods.
    """

    title = "GRPO"
    value_model = None
    windows = None

    def trained(self, responses: Sequence[Response]) -> list[Response]:
        """Responses with an advantage. A group whose responses all have the same reward has no gradient."""
        return [response for response in responses if response.advantage != 0]

    def with_targets(self, batch: MicroBatch, outputs: Outputs) -> MicroBatch:
        """The micro-batch with all that the loss needs from the recompute, here nothing."""
        return batch

    def loss(self, batch: MicroBatch, outputs: Outputs, old: torch.Tensor, tokens: TrainedTokens) -> Loss:
        """The clipped loss, mean over response tokens.

        Args:
            batch: from `with_targets`.
            outputs: under the weights now.
            old: log-probabilities `[B, T]` under the weights before the step.
            tokens: of the mini-batch.
        """
        return policy_loss(outputs.log_probs - old, batch, tokens)


class Laps(dict[str, float]):
    """Seconds of consecutive parts of a step, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """End the current part, give it a name, and start the next one."""
        now = time.perf_counter()
        self[name], self._last = now - self._last, now


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step whose responses are on their ranks.

    Attributes:
        schedule: of all ranks.
        planned: plan of the step over all ranks; None in mode `live`.
        trace: routing of this rank's responses, in plan order.
        batches: this rank's micro-batches, one per micro-step. The recompute adds what the algorithm's loss needs.
        tokens: of each mini-batch over all ranks.
        computed_tokens: that all ranks feed to the model.
    """

    schedule: Schedule
    planned: PlannedStep | None
    trace: RoutingTrace
    batches: list[MicroBatch]
    tokens: list[TrainedTokens]
    computed_tokens: int


class Trainer:
    """One rank of a training run.

    Args:
        config: settings of the run.
        checkpoint: to continue from; None for a new run.

    Attributes:
        algorithm: decides on losses.
        first_step: index of the first RL step to run.
        held_out_accuracy: measured so far, by the time of measurement.
    """

    def __init__(self, config: TrainConfig, checkpoint: Checkpoint | None = None) -> None:
        self.config, self.operation = config, task.TASKS[config.task]
        self.first_step = checkpoint.step if checkpoint else 0
        self.held_out_accuracy = dict(checkpoint.held_out_accuracy) if checkpoint else {}
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        torch.set_flush_denormal(True)
        torch.manual_seed(config.seed)
        model = checkpoint.folder if checkpoint else config.model
        self.tokenizer = task.load_tokenizer(model, config.task)
        self.model_config = task.load_config(model, self.tokenizer, config.expert_width)
        self.model = task.load_model(model, self.model_config, torch.float32).to(self.device)
        self.rollout_model = task.load_model(None, self.model_config, torch.bfloat16).to(self.device).eval()
        self.layer_indices = np.array(list(moe_blocks(self.model)), np.int32)
        # Given rates, so that a resumed run makes the same plans.
        self.session = self._session(config.mode, config.policy, rates=default_rates(self.device))
        distribute_experts(self.model, self.session)
        self.model.train()
        self.replicated = self.session.replicated_parameters(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.session.register_optimizers(self.optimizer)
        self.algorithm = self._make_algorithm()
        if checkpoint:
            self._restore(checkpoint)

    def _session(self, mode: Any, policy: Any, **settings: Any) -> Session:
        settings["ranks_per_node"] = rank_variable("LOCAL_WORLD_SIZE", self.num_ranks)
        experts, slots = num_experts(self.model_config), self.config.slots
        return Session(num_experts=experts, mode=mode, policy=policy, slots_per_rank=slots, **settings)

    def _make_algorithm(self) -> GRPO | PPO:
        config = self.config
        if config.algorithm == "grpo":
            return GRPO()
        if config.value_model == "head":
            value_model = ValueHead(self.model_config.hidden_size, config.seed, self.session, self.device)
        else:
            # Planned runs can be repeated bit for bit: `quota` depends on the counts of the layer alone.
            policy = config.policy if self.is_live else "quota" if config.mode == "plan" else "off"
            value_model = ValueTrunk(self.model_config, self._session("live", policy), self.device)
        if config.algorithm == "ppo":
            return PPO(value_model)
        places = len(range(self.rank, config.problems, self.num_ranks)) * config.samples
        sizes = {"window": config.window, "max_new_tokens": config.max_new_tokens, "seed": config.seed}
        return PPO(value_model, Windows(places, operation=self.operation, **sizes))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Continue with optimizer and algorithm of a checkpoint."""
        self.session.whole.load_optimizer_state(self.model, self.optimizer, checkpoint.optimizer)
        for name, part in self._stateful.items():
            part.load_state(checkpoint.algorithm[name])
        self.sync_rollout()

    @property
    def _stateful(self) -> dict[str, Any]:
        """Parts of the algorithm that have a state from step to step."""
        parts = {"value_model": self.algorithm.value_model, "windows": self.algorithm.windows}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def is_live(self) -> bool:
        """Whether steps are balanced from live routing."""
        return bool(self.config.mode == "live")

    def warm_start(self, steps: Iterable[int]) -> None:
        """Train on demonstrations. Their routing is not known, so layers follow the router. Collective."""
        config, rng, rate = self.config, random.Random(f"warm start {self.config.seed}"), WARM_START_LEARNING_RATE
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=config.warm_start_steps + 1, pct_start=0.1
        )
        routed: list[Any] = []
        routers = [router_of(block) for block in moe_blocks(self.model).values()]
        hooks = [router.register_forward_hook(lambda *call: routed.append(call[2])) for router in routers]
        for _ in steps:
            shown = [task.draw_demonstration(rng, self.operation) for _ in range(config.warm_start_batch)]
            batch = self._demonstrations(shown[self.rank :: self.num_ranks])
            routed.clear()
            with self.session.live_micro_step(positions=batch.positions):
                logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
                log_probs = token_log_probs(logits, batch.targets)
                loss = -(log_probs * batch.response_mask).sum() / batch.response_mask.sum()
                fed = batch.positions
                balance = sum(load_balancing_loss(scores[fed], ids[fed]) for scores, _, ids in routed)
                # All ranks have equal weight; the constant is known before the step.
                ((loss + BALANCE_WEIGHT * balance) / self.num_ranks).backward()
            self.session.finish_gradients(self.replicated)
            self.session.clip_gradients(self.replicated, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        for hook in hooks:
            hook.remove()
        self.sync_rollout()
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.start_from(self.session.whole_state_dict(self.model))

    def _demonstrations(self, shown: Sequence[tuple[task.Problem, str]]) -> MicroBatch:
        """Problems with responses that nobody sampled, so that they have neither routing nor log-probabilities."""
        texts = self.tokenizer([problem.prompt + response for problem, response in shown])["input_ids"]
        prompts = self.tokenizer([problem.prompt for problem, _ in shown])["input_ids"]
        nothing = np.zeros(0)
        responses = [
            Response(np.array(text), len(prompt), nothing, np.zeros(len(text) - len(prompt)))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        return collate(responses, pad_token_id=self.tokenizer.pad_token_id, device=self.device)

    @torch.no_grad()
    def sync_rollout(self) -> None:
        """Copy the trained weights to the rollout model, and round them before they are sent. Collective."""
        layers = {id(parameter): layer for layer in self.session.homes for parameter in layer.parameters}
        trained = (*self.model.named_parameters(), *self.model.named_buffers())
        targets = dict(self.rollout_model.named_parameters()) | dict(self.rollout_model.named_buffers())
        for name, value in trained:
            target, layer = targets[name], layers.get(id(value))
            if layer is None:
                target.copy_(value)
                continue
            # Bytes, since a backend may not know the dtype.
            mine = value.to(target.dtype).view(torch.uint8)
            of_ranks = [torch.empty_like(mine) for _ in range(self.num_ranks)]
            dist.all_gather(of_ranks, mine)
            for experts_H, rows in zip(layer.places.experts_RH, of_ranks, strict=True):
                target[torch.from_numpy(experts_H)] = rows.view(target.dtype)

    def measure_accuracy(self, when: str) -> float:
        """Measure the fraction of held-out problems that the rollout model solves greedily. Collective."""
        problems = task.held_out_problems(self.config.held_out, self.operation)
        self.held_out_accuracy[when] = self.total(self.count_correct(problems)) / len(problems)
        return self.held_out_accuracy[when]

    def count_correct(self, problems: Sequence[task.Problem]) -> int:
        """Number of this rank's part of the problems that the rollout model solves greedily."""
        mine = problems[self.rank :: self.num_ranks]
        if not mine:
            return 0
        prompts = encode(self.tokenizer, mine, self.device)
        tokens, _ = generate(self.rollout_model, self.tokenizer, prompts, self.config.max_new_tokens)
        return count_solved(self.tokenizer, mine, tokens[:, prompts["input_ids"].shape[1] :])

    def rollout(self, step: int) -> list[Response]:
        """Responses to this rank's part of a step's problems, or a window of the algorithm's responses."""
        if self.algorithm.windows is not None:
            return self.algorithm.windows.advance(self.rollout_model, self.tokenizer, step)
        rng = random.Random(f"problems {self.config.seed} {step}")
        problems = [
            task.draw_problem(rng, held_out=False, operation=self.operation) for _ in range(self.config.problems)
        ]
        ahead = None if self.is_live else partial(self.session.plan_ahead, token_budget=self.config.token_budget)
        return self.sample(problems, step, ahead)

    def sample(
        self, problems: Sequence[task.Problem], step: int, count: Callable[[RoutingTrace], None] | None
    ) -> list[Response]:
        """Responses to this rank's part of the problems of all ranks.

        Args:
            count: takes the routing of responses that end first, from which the next plan is prepared.
        """
        indices = range(self.rank, len(problems), self.num_ranks)
        mine = [problems[index] for index in indices]
        return sample_groups(self.rollout_model, self.tokenizer, mine, self.draws(step, indices), count)

    def draws(self, step: int, problems: Sequence[int]) -> Any:
        """Draws of all responses to these problems of a step."""
        return response_draws(self.config.seed, step, problems, self.config.samples, self.config.max_new_tokens)

    def routing_of(self, responses: Sequence[Response], step: int) -> RoutingTrace:
        """The routing of this rank's responses."""
        return RoutingTrace.from_sequences(
            [response.expert_ids for response in responses],
            num_experts=num_experts(self.model_config),
            shape=(len(self.layer_indices), self.model_config.num_experts_per_tok),
            layer_indices=self.layer_indices,
            prompt_lengths=[response.prompt_length for response in responses],
            steps=step,
            sequence_hashes=[hash_tokens(response.token_ids) for response in responses],
            prompt_hashes=[hash_tokens(response.token_ids[: response.prompt_length]) for response in responses],
            windows=[response.windows for response in responses],
            model=self.model_config.model_type,
        )

    def prepare(self, responses: Sequence[Response], step: int) -> PreparedStep:
        """Schedule the step of all ranks' responses, and form this rank's micro-batches. Collective.

        In mode `live` the schedule is made from lengths alone. In other modes the step is planned.
        Mini-batches take every n-th response, so that each has some responses of most groups.
        """
        of_ranks: list[list[Response]] = gather(responses)
        everyone = [response for part in of_ranks for response in part]
        lengths = np.array([(r.num_fed, r.policy_tokens, r.value_tokens) for r in everyone], np.int64).reshape(-1, 3)
        count, budget, planned = self.config.mini_batches, self.config.token_budget, None
        mini_batch = np.arange(len(lengths)) % count
        if self.is_live:
            sizes: Any = {"num_ranks": self.num_ranks, "token_budget": budget, "mini_batch": mini_batch}
            schedule = pack_by_length(lengths[:, 0], **sizes)
        else:
            routing = self.routing_of(responses, step)
            planned = self.session.plan_sequences(routing, token_budget=budget, mini_batch=mini_batch)
            schedule = planned.schedule
        is_mine, pad = schedule.rank == self.rank, self.tokenizer.pad_token_id
        parts = [
            [everyone[index] for index in np.flatnonzero(is_mine & (schedule.micro_step == micro_step))]
            for micro_step in range(schedule.num_micro_steps)
        ]
        batches = [collate(part, pad_token_id=pad, device=self.device) for part in parts]
        sums = [np.bincount(mini_batch, weights=column, minlength=count).astype(int) for column in lengths.T[1:]]
        tokens = [TrainedTokens(*pair) for pair in zip(*(column.tolist() for column in sums), strict=True)]
        trace = self.routing_of([response for part in parts for response in part], step)
        return PreparedStep(schedule, planned, trace, batches, tokens, int(lengths[:, 0].sum()))

    def forward(self, batch: MicroBatch, wanted: torch.Tensor) -> Outputs:
        """Run the model on a micro-batch, inside its micro-step.

        Args:
            wanted: `[B, T]`, not 0 where the log-probability of the target is needed. Others are 0, and have no logits.
        """
        hidden = self.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows = wanted.flatten().nonzero()[:, 0]
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1)[rows])
        found = token_log_probs(logits, batch.targets.flatten()[rows])
        return Outputs(found.new_zeros(wanted.numel()).index_put((rows,), found).view_as(wanted), hidden)

    def micro_step(self, batch: MicroBatch, index: int) -> MicroStep:
        """Context for the forwards and backwards of a micro-batch."""
        if self.is_live:
            return self.session.live_micro_step(positions=batch.positions)
        return self.session.micro_step(index, positions=batch.positions, sequence_hashes=batch.sequence_hashes)

    def recompute(self, prepared: PreparedStep) -> list[torch.Tensor]:
        """Log-probabilities of all micro-batches under the weights before the step.

        The micro-batches get what the algorithm's loss needs beside them.
        """
        old_log_probs = []
        for index, batch in enumerate(prepared.batches):
            with torch.no_grad(), self.micro_step(batch, index):
                outputs = self.forward(batch, batch.response_mask)
                prepared.batches[index] = self.algorithm.with_targets(batch, outputs)
                old_log_probs.append(outputs.log_probs)
        return old_log_probs

    def rollout_difference(self, prepared: PreparedStep, old_log_probs: Sequence[torch.Tensor]) -> float:
        """Mean absolute difference of the recompute's log-probabilities to the rollout's, in nats per trained token of
        this step. Only rounding of the rollout (bfloat16) remains if the recompute replays its routing. Collective."""
        difference = tokens = 0.0
        for batch, log_probs in zip(prepared.batches, old_log_probs, strict=True):
            mask = batch.policy_mask * (batch.ages == 0)
            difference += float(((log_probs - batch.rollout_log_probs).abs() * mask).sum())
            tokens += float(mask.sum())
        return self.mean(difference, tokens)

    def accumulate(
        self, prepared: PreparedStep, old_log_probs: Sequence[torch.Tensor], mini_batch: int
    ) -> dict[str, Any]:
        """Run forward and backward of one mini-batch's micro-steps, and complete the gradients. Collective.

        Returns:
            Sums over this rank's tokens: `loss`, already divided by the tokens of all ranks; and pairs by metric, as in
            `Loss`.
        """
        sums: dict[str, Any] = {"loss": 0.0}
        for index in prepared.schedule.micro_steps_of(mini_batch):
            batch = prepared.batches[index]
            with self.micro_step(batch, index):
                outputs = self.forward(batch, batch.policy_mask)
                loss, figures = self.algorithm.loss(batch, outputs, old_log_probs[index], prepared.tokens[mini_batch])
                loss.backward()
            for name, value in {"loss": float(loss.detach()), **figures}.items():
                sums[name] = sums.get(name, 0.0) + np.array(value)
        self.session.finish_gradients(self.replicated)
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.finish_gradients()
        return sums

    def update(self, prepared: PreparedStep, old_log_probs: Sequence[torch.Tensor], step: int) -> dict[str, float]:
        """Run all optimizer steps of an RL step. Returns metrics, equal on all ranks. Collective."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        sums, norms = dict[str, Any](), []
        for mini_batch in range(self.config.mini_batches):
            for name, value in self.accumulate(prepared, old_log_probs, mini_batch).items():
                sums[name] = sums.get(name, 0.0) + value
            norms.append(self.session.clip_gradients(self.replicated, MAX_NORM))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.algorithm.value_model is not None:
                self.algorithm.value_model.step()
        # Every rank has the same names.
        metrics = {"grad_norm": norms[0], "loss": self.total(sums.pop("loss")) / self.config.mini_batches}
        if self.algorithm.value_model is not None:
            metrics |= self.algorithm.value_model.metrics()
        return metrics | {name: self.mean(*pair) for name, pair in sums.items()}

    def train(self, responses: Sequence[Response], step: int) -> tuple[PreparedStep, dict[str, Any]]:
        """Prepare, recompute, update, and copy the weights to the rollout model: an RL step after its rollout.
        Collective.

        Returns:
            The step, and metrics, which are equal on all ranks but for times.
        """
        laps = Laps()
        prepared = self.prepare(responses, step)
        metrics: dict[str, Any] = {
            "tokens/computed": prepared.computed_tokens,
            "tokens/trained": sum(tokens.policy for tokens in prepared.tokens),
        }
        laps.end("prepare_s")
        self.session.take_metrics()
        report = None if prepared.planned is None else self.session.apply_plan(prepared.planned, prepared.trace)
        laps.end("plan_s")
        old_log_probs = self.recompute(prepared)
        laps.end("recompute_s")
        metrics["ppo/rollout_logprob_diff"] = self.rollout_difference(prepared, old_log_probs)
        metrics |= self.update(prepared, old_log_probs, step)
        laps.end("update_s")
        metrics |= self.after_update(prepared)
        self.sync_rollout()
        laps.end("sync_s")
        # Every micro-step runs twice, in recompute and in update.
        metrics |= {"moe/micro_steps": 2 * prepared.schedule.num_micro_steps, "plan/background_s": 0.0} | laps
        for name, value in self.session.take_metrics().items():
            metrics[name] = value if name.startswith(("moe/", "plan/", "live/")) else self.total(value)
        if report is None:
            names = ("max_vio_before", "max_vio_after", "replicas")
            return prepared, metrics | {f"moe/{name}": metrics[f"live/{name}"] for name in names}
        metrics |= report.metrics()
        metrics["waited_s"] += metrics["plan/waited_s"]
        # What was planned while the step ran, in place of what was expected.
        for figure, planned in (("moe/replicas", "moe/planned_replicas"), ("moe/max_vio_after", "moe/planned_max_vio")):
            metrics[figure] = metrics.get(planned, metrics[figure])
        return prepared, metrics

    def after_update(self, prepared: PreparedStep) -> dict[str, float]:
        """Called before the rollout gets the weights. Returns metrics. Collective."""
        return {}

    def step(self, step: int) -> dict[str, Any]:
        """Run one RL step. Returns its metrics; all but times are equal on all ranks. Collective."""
        laps = Laps()
        responses = self.rollout(step)
        laps.end("rollout_s")
        metrics = {"step": step} | self.rollout_metrics([r for part in gather(responses) for r in part])
        prepared, of_training = self.train(self.algorithm.trained(responses), step)
        traces = gather(prepared.trace)
        if self.rank == 0:
            write_trace(RoutingTrace.concatenate(traces), self.config.out / "routing" / f"step-{step:05d}.parquet")
        return metrics | of_training | laps

    def rollout_metrics(self, responses: Sequence[Response]) -> dict[str, Any]:
        """Metrics of a step's rollout, from the responses of all ranks, each of which had a place.

        A decode step samples one token of every response that has not ended, on every rank. Ranks decode side by side
        and wait for the one with most decode steps. The occupancy is sampled tokens / (places x decode steps).
        """
        finished, new = [r for r in responses if r.is_finished], [r.new_tokens for r in responses]
        return {
            "reward": sum(r.reward for r in finished) / max(1, len(finished)),
            "response_length": sum(r.length for r in finished) / max(1, len(finished)),
            "trained_sequences": len(self.algorithm.trained(responses)),
            "rollout/longest_response": max(r.length for r in responses),
            "rollout/finished": len(finished),
            "rollout/tokens": sum(new),
            "rollout/prefix_tokens": sum(len(r.token_ids) for r in responses) - sum(new),
            "rollout/decode_steps": max(new),
            "rollout/occupancy": sum(new) / (len(new) * max(new)),
        }

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` RL steps. Collective."""
        # Gathering is collective; only rank 0 receives tensors.
        weights = dict(self.session.whole.weights(self.model))
        optimizer = dict(self.session.whole.optimizer_state(self.model, self.optimizer))
        algorithm = {name: part.state() for name, part in self._stateful.items()}
        if self.rank == 0:
            folder = self.config.out / "checkpoints" / f"step-{step:05d}"
            checkpoint = Checkpoint(folder, step, self.held_out_accuracy, optimizer, algorithm)
            write_checkpoint(checkpoint, self.model_config, self.tokenizer, weights)

    def close(self) -> None:
        """Release threads and shared memory."""
        self.session.close()
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.close()

    def mean(self, total: float, count: float) -> float:
        """The mean over all ranks from this one's sum and number of values; 0 without values. Collective."""
        return self.total(total) / max(1.0, self.total(count))

    def total(self, value: float) -> float:
        """The sum over all ranks. Collective."""
        summed = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return float(summed)


def load_balancing_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961) of one layer; 1 if all experts are equally likely.

    Args:
        logits: `[T, E]` of the router.
        ids: `[T, K]` chosen experts.
    """
    experts = logits.shape[1]
    fraction_E = torch.bincount(ids.flatten(), minlength=experts) / ids.numel()
    return experts * (fraction_E * logits.softmax(dim=-1).mean(dim=0)).sum()


def run_training(trainer_type: type[Trainer], config: TrainConfig) -> None:
    """Train from the last checkpoint in `config.out`, or from the start. All files are written there. Collective."""
    trainer, out = trainer_type(config, last_checkpoint(config.out)), config.out
    is_writer, accuracy = trainer.rank == 0, trainer.held_out_accuracy
    screen = console(quiet=not is_writer)
    if is_writer:
        write_atomically(out / "settings.json", config.to_json(trainer.num_ranks))
        path, events = out / "metrics.jsonl", SummaryWriter(str(out / "tensorboard"), purge_step=trainer.first_step)
        kept = path.read_text().splitlines(keepends=True)[: trainer.first_step] if path.exists() else []
        write_atomically(path, "".join(kept))
    if accuracy:
        screen.print(f"continuing after {trainer.first_step} of {config.steps} steps")
    else:
        trainer.warm_start(track(range(config.warm_start_steps), "warm start", disable=not is_writer))
        trainer.measure_accuracy("after warm start")
        trainer.save(0)
    screen.print(f"held-out accuracy after warm start: {accuracy['after warm start']:.1%}", HEADER, sep="\n")
    for step in range(trainer.first_step, config.steps):
        metrics = trainer.step(step)
        is_last = step + 1 == config.steps
        if is_last or (config.measure_every and (step + 1) % config.measure_every == 0):
            metrics["held_out_accuracy"] = trainer.measure_accuracy(f"after {step + 1} {trainer.algorithm.title} steps")
        if is_writer:
            with path.open("a") as lines:
                lines.write(json.dumps(metrics) + "\n")
            for name in metrics.keys() - {"step"}:
                events.add_scalar(name, metrics[name], step)
            events.flush()
        screen.print(LINE.format_map(metrics | {"plan_ms": metrics["plan_s"] * 1e3}))
        if is_last or (step + 1) % config.save_every == 0:
            trainer.save(step + 1)
    comparison = None
    if config.compare_pairs and config.mode == "plan":
        # Rank 0 has written it.
        dist.barrier()
        static = trainer_type(replace(config, mode="static"), last_checkpoint(out))
        # A pair that warms up comes first.
        pairs = range(config.steps, config.steps + config.compare_pairs + 1)
        shown = track(pairs, f"static against {config.mode}", disable=not is_writer)
        comparison = compare_policies(static, trainer, shown)
        static.close()
    if is_writer:
        files = show_results(screen, trainer, comparison)
        files += ["metrics.jsonl", "routing/", "checkpoints/", "tensorboard/"]
        screen.print(f"Everything is in {out}: {', '.join(files)}")


def start(trainer_type: type[Trainer], config_type: type[TrainConfig], options: argparse.Namespace) -> None:
    """Begin or resume the run that the options ask for.

    Raises:
        InputError: if options don't fit each other or the run in the folder.
    """
    out, asked, ranks = options.out, given(options, config_type), 2
    is_new = not out.exists() or not any(out.iterdir())
    if options.resume and not is_new:
        config, ranks = resumed(config_type, out, asked)
    elif os.environ.get("RANK", "0") == "0" and not is_new:
        raise InputError(f"--output {out} is there already and not empty; name a new folder, or --resume the run in it")
    else:
        longest = task.LONGEST_RESPONSES[asked.get("task", config_type.task)]
        config = config_type(**{"max_new_tokens": longest, **asked})
    ranks, folder = torchrun_ranks() or options.ranks or ranks, last_folder(out)
    if folder is not None and step_of(folder) > config.steps:
        raise InputError(f"--steps is {config.steps}; the run in {out} has done {step_of(folder)} already")
    model_config = task.load_config(config.model, task.load_tokenizer(config.model, config.task))
    # Raises an error if the ranks don't divide the experts.
    Placement.contiguous(1, num_experts(model_config), ranks)
    config.check(ranks, model_config)
    out.mkdir(parents=True, exist_ok=True)
    launch(run_training, (trainer_type, config), ranks=ranks)


def command(
    name: str, description: str, examples: Sequence[str], trainer: type[Trainer], config: type[TrainConfig],
    arguments: Sequence[str] | None,
) -> int:  # fmt: skip
    """Run the command of a recipe. Returns its exit status."""
    lines = [f"python -m {name} {words}" for words in examples]
    parser = Parser(prog=f"python -m {name}", description=description, examples=lines)
    add_to(parser, config)
    parser.set_defaults(run=partial(start, trainer, config), needs=("torch", "transformers", "tensorboard"))
    return run_command(parser.prog, lambda: parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    description = (
        "Warm start on several tasks, then RL on one of them. Writes metrics.jsonl, summary.json, settings.json, "
        "routing/, checkpoints/, tensorboard/, and of a comparison report.html and timeline.json.gz."
    )
    examples = (
        "-o out/demo",
        "-o out/demo --resume --steps 60",
        "-o out/tppo --algorithm t-ppo --task counting --window 32",
        "-o out/live --mode live --policy quota",
        "--model path/to/qwen3-moe --warm-start-steps 0 --ranks 8 -o out/run",
    )
    return command("recipes.rl.train", description, examples, Trainer, TrainConfig, arguments)


if __name__ == "__main__":
    # The module as other processes import it.
    sys.exit(import_module("recipes.rl.train").main())
