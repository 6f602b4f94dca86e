"""`Trainer`: one RL step on every rank: rollout, plan, recompute, update, weight sync."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimtab.integrations.transformers import distribute_experts, moe_blocks, num_experts
from trimtab.planner import Placement, pack_by_length
from trimtab.rank_variables import rank_variable
from trimtab.rl.algorithm import TokenOutputs
from trimtab.rl.algorithm_choice import make_algorithm
from trimtab.rl.batches import MicroBatch
from trimtab.rl.checkpoint import Checkpoint, write_checkpoint
from trimtab.rl.collectives import gather, reduce
from trimtab.rl.config import TrainConfig
from trimtab.rl.demo_model import load_config, load_model, load_tokenizer
from trimtab.rl.disaggregated_sampling import make_disaggregated, response_draws
from trimtab.rl.losses import token_log_probs
from trimtab.rl.prepared_step import PreparedStep, micro_batches, trained_tokens
from trimtab.rl.rollout import count_correct, held_out_problems, sample_groups
from trimtab.rl.rollout_weights import RolloutWeights
from trimtab.rl.sequences import Sequence, exchange_sequences, gather_lengths, routing_of
from trimtab.rl.step_metrics import StepClock, live_metrics, rollout_metrics
from trimtab.rl.task import TASKS, draw_problem
from trimtab.rl.value_model import ValueModel
from trimtab.rl.warm_start import warm_start
from trimtab.rl.windows import Windows
from trimtab.runtime import MicroStep, Session
from trimtab.runtime.step_planner import default_rates
from trimtab.trace import RoutingTrace, read_trace, write_trace
from trimtab.trace.routing import no_route

WARM_UP_STEPS = 3


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
        self.config = config
        self.first_step = checkpoint.step if checkpoint else 0
        self.held_out_accuracy = dict(checkpoint.held_out_accuracy) if checkpoint else {}
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        torch.set_flush_denormal(True)
        torch.manual_seed(config.seed)
        model = checkpoint.directory if checkpoint else config.model
        self.tokenizer = load_tokenizer(model, config.task)
        self.model_config = load_config(model, self.tokenizer, config.expert_width)
        self.model = load_model(model, self.model_config, torch.float32).to(self.device)
        self.rollout_model = load_model(None, self.model_config, torch.bfloat16).to(self.device).eval()
        self.layer_indices = np.array(list(moe_blocks(self.model)), np.int32)
        self.session = Session(
            num_experts=num_experts(self.model_config),
            mode=config.mode,
            policy=config.policy,
            slots_per_rank=config.slots,
            ranks_per_node=rank_variable("LOCAL_WORLD_SIZE", self.num_ranks),
            # Given, so that a resumed run makes the same plans.
            rates=default_rates(self.device),
        )
        distribute_experts(self.model, self.session)
        self._remote = make_disaggregated(config, self.rollout_model, self.tokenizer)
        self._rollout_weights = None
        if self._remote is None:
            self._rollout_weights = RolloutWeights(self.model, self.rollout_model, self.session)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.replicated = self.session.replicated_parameters(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.session.register_optimizers(self.optimizer)
        self.algorithm = make_algorithm(config, self.model_config, self.device)
        if checkpoint:
            self.session.logical.load_optimizer_state(self.model, self.optimizer, checkpoint.optimizer_state())
            algorithm_state = checkpoint.algorithm_state()
            for part in self._stateful:
                part.load_state(algorithm_state)
            home = np.array(checkpoint.homes, np.int16)
            if home.max() + 1 == self.num_ranks:
                self.session.move(Placement(home))
            if self._remote is not None:
                self._remote.place(self._trace_before(checkpoint))
            self.sync_rollout()

    @property
    def _stateful(self) -> list[ValueModel | Windows]:
        """Parts of the algorithm that have a state from step to step."""
        return [part for part in (self.algorithm.value_model, self.algorithm.windows) if part is not None]

    @property
    def is_live(self) -> bool:
        """Whether steps are balanced from live routing."""
        return self.config.mode == "live"

    def warm_start(self, on_step: Callable[[float], None] = lambda loss: None) -> None:
        """Run the supervised steps, if any, and then `weights_are_ready`. Collective.

        Args:
            on_step: called after every supervised step with this rank's loss.
        """
        if self.config.warm_start_steps:
            warm_start(self.model, self.session, self.replicated, self.tokenizer, self.config, on_step)
        self.weights_are_ready()

    def weights_are_ready(self) -> None:
        """Copy the weights that RL starts from to the rollout model, and to a value model with layers like the
        policy's. Collective.
        """
        self.sync_rollout()
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.start_from(self.session.logical_state_dict(self.model))

    def sync_rollout(self) -> None:
        """Copy the trained weights to the rollout model. Collective."""
        if self._rollout_weights is not None:
            self._rollout_weights.copy()
        if self._remote is not None:
            self._remote.rollout.load(self.model, self.session)

    def measure_accuracy(self, when: str) -> None:
        """Measure the fraction of held-out problems that the rollout model solves greedily. Collective."""
        problems = held_out_problems(self.config.held_out, TASKS[self.config.task])
        if self._remote is not None:
            correct = self._remote.count_correct(problems)
        else:
            mine, most = problems[self.rank :: self.num_ranks], self.config.max_new_tokens
            correct = count_correct(self.rollout_model, self.tokenizer, mine, max_new_tokens=most)
        self.held_out_accuracy[when] = self._total(correct) / len(problems)

    def rollout(self, step: int) -> list[Sequence]:
        """Responses to this rank's part of a step's problems, or a window of the algorithm's responses."""
        if self.algorithm.windows is not None:
            return self.algorithm.windows.advance(self.rollout_model, self.tokenizer, step)
        rng = random.Random(f"problems {self.config.seed} {step}")
        operation = TASKS[self.config.task]
        problems = [draw_problem(rng, held_out=False, operation=operation) for _ in range(self.config.problems)]
        count = None if self.is_live else partial(self.session.plan_ahead, token_budget=self.config.token_budget)
        if self._remote is not None:
            return self._remote.sample_groups(problems, step, self._routing_of, count)
        return sample_groups(
            self.rollout_model,
            self.tokenizer,
            problems[self.rank :: self.num_ranks],
            samples=self.config.samples,
            max_new_tokens=self.config.max_new_tokens,
            uniforms=response_draws(self.config, step, range(self.rank, len(problems), self.num_ranks)),
            count=count,
        )

    def prepare(self, sequences: list[Sequence], step: int) -> PreparedStep:
        """Schedule the step of all ranks' sequences, exchange them, and form this rank's micro-batches. Collective.

        In mode `live` the schedule is made from lengths alone. In other modes the step is planned.
        Mini-batches take every n-th sequence, so that each has some sequences of most groups.
        """
        unknown = no_route(num_experts(self.model_config))
        sequences = [s.with_prefix_routing(self.config.prefix_routing, unknown) for s in sequences]
        lengths_R = gather_lengths(sequences)
        lengths = np.concatenate(lengths_R)
        mini_batch = np.arange(len(lengths)) % self.config.mini_batches
        budget, planned = self.config.token_budget, None
        if self.is_live:
            schedule = pack_by_length(
                lengths[:, 0], num_ranks=self.num_ranks, token_budget=budget, mini_batch=mini_batch
            )
        else:
            routing = self._routing_of(sequences, step)
            planned = self.session.plan_sequences(routing, token_budget=budget, mini_batch=mini_batch)
            schedule = planned.schedule
        first = sum(len(part) for part in lengths_R[: self.rank])
        arrived = exchange_sequences(sequences, schedule.rank[first : first + len(sequences)], self.device)
        mine, batches = micro_batches(arrived, schedule, self.rank, self.tokenizer.pad_token_id, self.device)
        tokens = trained_tokens(lengths[:, 1:], mini_batch, self.config.mini_batches)
        return PreparedStep(schedule, planned, self._routing_of(mine, step), batches, tokens, int(lengths[:, 0].sum()))

    def _trace_before(self, checkpoint: Checkpoint) -> RoutingTrace:
        """The last routing of a step before the checkpoint on rank 0; on other ranks, and of no step, that of none."""
        steps = range(checkpoint.step - 1, -1, -1) if self.rank == 0 else ()
        traces = (read_trace(self._routing_file(step)) for step in steps if self._routing_file(step).exists())
        return next((trace for trace in traces if trace.num_sequences), self._routing_of([], 0))

    def _routing_file(self, step: int) -> Path:
        return self.config.out / "routing" / f"step-{step:05d}.parquet"

    def _routing_of(self, sequences: list[Sequence], step: int) -> RoutingTrace:
        return routing_of(
            sequences,
            num_experts=num_experts(self.model_config),
            shape=(len(self.layer_indices), self.model_config.num_experts_per_tok),
            layer_indices=self.layer_indices,
            step=step,
            model=self.model_config.model_type,
        )

    def forward(self, batch: MicroBatch, wanted: torch.Tensor) -> TokenOutputs:
        """Run the model on a micro-batch, inside its micro-step.

        Args:
            wanted: `[B, T]`, not 0 where the log-probability of the target is needed. Others are 0, and have no logits.
        """
        hidden = self.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows = wanted.flatten().nonzero()[:, 0]
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1)[rows])
        found = token_log_probs(logits, batch.targets.flatten()[rows])
        log_probs = found.new_zeros(wanted.numel()).index_put((rows,), found).view_as(wanted)
        return TokenOutputs(log_probs, hidden)

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

    def rollout_difference(self, prepared: PreparedStep, old_log_probs: list[torch.Tensor]) -> float:
        """Mean absolute difference of the recompute's log-probabilities to the rollout's, in nats per token.

        Only rounding of the rollout (bfloat16) remains if the recompute replays its routing. Collective.
        """
        difference, tokens = map(self._total, prepared.rollout_differences(old_log_probs))
        return difference / max(1, tokens)

    def accumulate(
        self, prepared: PreparedStep, old_log_probs: list[torch.Tensor], mini_batch: int
    ) -> dict[str, float]:
        """Run forward and backward of one mini-batch's micro-steps, and complete the gradients. Collective.

        Returns:
            Sums over this rank's response tokens: `loss` (already divided by the tokens of all ranks), and the
            algorithm's figures.
        """
        sums = dict.fromkeys(("loss", *self.algorithm.figures), 0.0)
        for index in prepared.schedule.micro_steps_of(mini_batch):
            batch = prepared.batches[index]
            with self.micro_step(batch, int(index)):
                outputs = self.forward(batch, batch.policy_mask)
                found = self.algorithm.loss(batch, outputs, old_log_probs[index], prepared.tokens[mini_batch])
                found.loss.backward()
            sums["loss"] += float(found.loss.detach())
            for name, value in found.sums.items():
                sums[name] += value
        self.session.finish_gradients(self.replicated)
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.finish_gradients()
        return sums

    def update(self, prepared: PreparedStep, old_log_probs: list[torch.Tensor], step: int) -> dict[str, float]:
        """Run all optimizer steps of an RL step. Returns metrics, equal on all ranks. Collective."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        metrics: dict[str, float] = {}
        figures = dict.fromkeys(self.algorithm.figures, 0.0)
        loss = 0.0
        for mini_batch in range(self.config.mini_batches):
            sums = self.accumulate(prepared, old_log_probs, mini_batch)
            norm = self.session.clip_gradients(self.replicated, self.config.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.algorithm.value_model is not None:
                self.algorithm.value_model.step()
            for name in figures:
                figures[name] += sums[name]
            loss += sums["loss"] / self.config.mini_batches
            if mini_batch == 0:
                metrics["grad_norm"] = norm
        metrics["loss"] = self._total(loss)
        if self.algorithm.value_model is not None:
            metrics |= self.algorithm.value_model.metrics()
        return metrics | self.algorithm.metrics({name: self._total(value) for name, value in figures.items()})

    def step(self, step: int) -> dict[str, Any]:
        """Run one RL step. Returns its metrics; all but times are equal on all ranks. Collective."""
        clock = StepClock()
        sequences = self.rollout(step)
        clock.lap("rollout_s")
        trained = self.algorithm.trained(sequences)
        metrics: dict[str, Any] = {"step": step} | rollout_metrics(sequences, self.device)
        metrics["trained_sequences"] = int(self._total(len(trained)))
        prepared, trained_metrics = self.train(trained, step, clock)
        metrics |= trained_metrics
        self.write_routing(prepared, step)
        clock.lap("write_s")
        return metrics | clock.laps

    def train(self, sequences: list[Sequence], step: int, clock: StepClock) -> tuple[PreparedStep, dict[str, Any]]:
        """Prepare, recompute, update, and copy the weights to the rollout model: an RL step after its rollout.
        Collective.

        Args:
            sequences: of this rank.
            step: index of the RL step.
            clock: measures the parts.

        Returns:
            The step, and metrics, which are equal on all ranks but for times.
        """
        metrics: dict[str, Any] = {}
        prepared = self.prepare(sequences, step)
        metrics["tokens/computed"] = prepared.computed_tokens
        metrics["tokens/trained"] = sum(tokens.policy for tokens in prepared.tokens)
        clock.lap("prepare_s")
        self.session.take_metrics()
        report = None if prepared.planned is None else self.session.apply_plan(prepared.planned, prepared.trace)
        clock.lap("plan_s")
        old_log_probs = self.recompute(prepared)
        clock.lap("recompute_s")
        metrics["ppo/rollout_logprob_diff"] = self.rollout_difference(prepared, old_log_probs)
        metrics |= self.update(prepared, old_log_probs, step)
        clock.lap("update_s")
        if self._remote is not None:
            metrics |= self._remote.place(prepared.trace)
        self.sync_rollout()
        clock.lap("sync_s")
        # Every micro-step runs twice, in recompute and in update.
        metrics["moe/micro_steps"] = 2 * prepared.schedule.num_micro_steps
        metrics["plan/background_s"] = 0.0
        for name, value in self.session.take_metrics().items():
            metrics[name] = value if name.startswith(("moe/", "plan/", "live/")) else self._total(value)
        if report is None:
            return prepared, metrics | live_metrics(metrics)
        metrics |= report.metrics()
        metrics["waited_s"] += metrics["plan/waited_s"]
        # What was planned while the step ran, in place of what was expected.
        for figure, planned in (("moe/replicas", "moe/planned_replicas"), ("moe/max_vio_after", "moe/planned_max_vio")):
            metrics[figure] = metrics.get(planned, metrics[figure])
        return prepared, metrics

    def write_routing(self, prepared: PreparedStep, step: int) -> None:
        """Write the routing of all ranks to `routing/step-*.parquet`. Collective."""
        traces = gather(prepared.trace)
        if traces:
            write_trace(RoutingTrace.concatenate(traces), self._routing_file(step))

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` RL steps. Collective."""
        weights = self.session.logical.weights(self.model)
        optimizer_state = self.session.logical.optimizer_state(self.model, self.optimizer)
        algorithm_state = self.algorithm_state()
        if self.rank == 0:
            homes = self.session.placement.home.tolist()
            model = (self.model_config, self.tokenizer)
            write_checkpoint(
                self.config.out, step, self.held_out_accuracy, homes, *model, weights, optimizer_state,
                algorithm_state,
            )  # fmt: skip
        else:
            for _ in chain(weights, optimizer_state):
                pass  # gathering is collective; only rank 0 receives tensors

    def algorithm_state(self) -> dict[str, torch.Tensor]:
        """State of the value model and of open responses, by name. Rank 0's goes into checkpoints. Collective."""
        return {name: value for part in self._stateful for name, value in part.state().items()}

    def close(self) -> None:
        """Release threads and shared memory."""
        self.session.close()
        if self.algorithm.value_model is not None:
            self.algorithm.value_model.close()

    def _total(self, value: float) -> float:
        """The sum over all ranks."""
        return reduce(value, self.device)
