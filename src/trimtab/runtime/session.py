"""`Session`: the public class of the runtime: plans of steps, micro-steps, gradients, renumbering, whole weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.gradients import SessionGradients
from trimtab.runtime.ranks.lockstep import RENUMBER, SUSPEND, SYNC_PLACEMENT, WHOLE, digest
from trimtab.runtime.ranks.process_groups import inner_group
from trimtab.runtime.ranks.rank_calls import attempt
from trimtab.runtime.ranks.recorder import Recorder
from trimtab.runtime.session_settings import SessionSettings, takes_arguments_of
from trimtab.runtime.session_steps import SessionSteps
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.old_state import state_in_order
from trimtab.runtime.state.optimizer_rows import ExpertState
from trimtab.runtime.state.renumbering import OnRenumber, check_order, places_after, tensors_by_expert
from trimtab.runtime.state.whole_state import WholeState
from trimtab.runtime.transfer import streams
from trimtab.trace.numbering import Numbering

# Below this part of recorded experts that the router chooses, too, a warning is logged once.
LEAST_AGREEMENT = 0.5


class Session(SessionSteps, SessionGradients):
    """Balanced expert parallelism over the ranks of a process group.

    Add every MoE layer once, and register the optimizers that train the experts. In every step, call `plan`, enter
    `micro_step` around forward and backward of each micro-step, and call `finish_gradients` before the optimizer steps.
    Outside micro-steps the layers are ordinary expert parallelism on the router's live choice. All methods are
    collective unless their docstring says otherwise.

    Its arguments are those of `SessionSettings`. Its parts: `SessionBase` has the layers, `SessionSteps` plans and
    applies plans, `SessionMicroSteps` runs micro-steps, `SessionGradients` completes gradients.

    Raises:
        InputError: if the ranks don't divide the experts, the groups the ranks, or the nodes a group; if the groups of
            a framework don't line up or don't include this rank; if an argument is out of its range.
    """

    @takes_arguments_of(SessionSettings)
    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        self._has_told_agreement = False

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """A context that records this rank's activities over time. Ranks that are compared should enter it together."""
        recorder = self.counters.recorder = Recorder(self._experts.device)
        try:
            yield recorder
        finally:
            self.counters.recorder = None

    def weights_changed(self) -> None:
        """Announce writes to parameters that address and version do not show: through `.data`, or to a flat buffer.

        Not a collective. Optimizer steps need no call.
        """
        self._experts.changed = True

    def suspend(self) -> None:
        """Give back everything that the session can create again: process groups, threads, slots of replicas, mirrors,
        shared and symmetric memory, copies of weights. Collective. When it returns, other processes of the GPU can
        use the memory, on all ranks; `memory` then has only the parameters, which stay the caller's.

        Call it before a framework hands the device to the rollout, or destroys its process groups. The plan ends with
        it. The next collective call of the session creates the groups again, on all data ranks, and the next plan the
        memory. If a framework's groups are other objects then, first assign `settings` with these. Numbering,
        optimizers and everything that was learnt stay.
        """
        if not self.topology.has_groups:
            return
        self._calls.require_between_micro_steps("suspend")
        self._lockstep.agree(SUSPEND, all_data_ranks=True)
        self._drop_step()
        self._elements = dict
        self._experts.drain()
        self._experts.close()
        if self.homes:
            streams.release_cache(self._experts.device)
        # Symmetric memory is freed when the last rank has unmapped it.
        dist.barrier(group=self.topology.control)
        self._lockstep.suspend()
        self.topology.drop_groups()

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Register the optimizers that train the experts. Not a collective.

        `renumber` needs them. Register all that train experts, and again if you replace one.

        Raises:
            InputError: if a layer was added with `weights`.
            RuntimeError: if an optimizer has loaded state from before experts were always in order; see
                `state_in_order`.
        """
        self._experts.need_own("be registered with optimizers")
        self._experts.optimizers.register(optimizers)
        if self.numbering is not None:
            # The experts may be other Parameters by now.
            self._record_numbering()

    def set_framework_state(self, state: ExpertState) -> None:
        """Let `renumber` exchange the experts of framework layers. Not a collective.

        Args:
            state: what a framework's optimizers keep of the experts.
        """
        self._experts.framework_state = state

    def on_renumber(self, callback: OnRenumber) -> None:
        """Call a function after every `renumber`, for what is kept of the model and combined with it by name: averages
        of weights, the weights of the last sync. Not a collective.

        Args:
            callback: called on all ranks with the number of each layer and its order `[E]`, old ids by new ones. It may
                be a collective.
        """
        self._on_renumber.append(callback)

    def renumber(self, order_LE: npt.ArrayLike | None = None, *, decoder_layers: npt.ArrayLike | None = None) -> bool:
        """Give the experts of each layer other ids, between optimizer step and next plan.

        Weights, state of optimizers, and what `by_expert` of `add_layer` declared are exchanged and permuted in place.
        The model computes the same function, and is a plain one with contiguous homes under its names. Traces then
        have to say which ids recorded them: `replace(trace, numbering=session.numbering)`, with the numbering of that
        time; they are mapped.

        Args:
            order_LE: `[L, E]`, of each new id the id now, as of `order_experts`; the same on all ranks. By default the
                homes that the planner chooses for the present step, if moving there pays in the steps that homes last.
            decoder_layers: `[L]`, those of the attribute by default.

        Returns:
            Whether any expert has another id.

        Raises:
            InputError: if it is no order, nothing was declared for a layer, an optimizer has state that is not by
                expert or is not registered, or FSDP or a framework has the experts or the router: then renumber the
                checkpoint.
            RuntimeError: if gradients are not zero, or there is neither an order nor a step that the session planned.
        """
        self._calls.require_between_micro_steps("renumber")
        if order_LE is None:
            order_LE = self._chosen_order()
        known = np.arange(len(self.homes)) if self.decoder_layers is None else self.decoder_layers
        layers = known if decoder_layers is None else np.asarray(decoder_layers)
        order, problem = attempt(self._checked_order, order_LE, layers)
        same: dict[str, object] = {}
        if order is not None:
            places_L = [places_after(layer.places, order[layer.index]) for layer in self.homes]
            others_L, problem = attempt(self._to_permute, order, places_L)
            same = {"order_LE": digest(order), "decoder_layers": layers.tolist()}
            if others_L is not None:
                forms = [[(tuple(tensor.shape), str(tensor.dtype)) for tensor in others] for others in others_L]
                same |= {"tensors by expert": forms} | self._experts.state_to_move(places_L)
        self._lockstep.agree(RENUMBER, must_match=same, problem=problem, all_data_ranks=True)
        assert order is not None
        assert others_L is not None
        if (np.diff(order) == 1).all():
            return False
        self._drop_step()
        self._experts.renumber(places_L, order, others_L)
        self.decoder_layers = layers
        self.numbering = (self.numbering or Numbering()).then(order, layers)
        for index, order_E in enumerate(order):
            for callback in self._on_renumber:
                callback(index, order_E)
        return True

    def _chosen_order(self) -> Array:
        """The order with which contiguous homes are those that the planner chooses for the present step."""
        step, problem = self._step, attempt(self._check_choice)[1]
        # Groups measure their own moves.
        move_ps = round(1e12 * (self._experts.move_s_per_expert or 0.0))
        values_RV = self._lockstep.agree(
            RENUMBER, must_match=self._shared, problem=problem, values=[move_ps], all_data_ranks=True
        )
        assert step is not None
        assert step.schedule is not None
        trace = step.completed_trace
        planned, _ = self._planner(trace, values_RV[:, 0].max() * 1e-12 or None).for_schedule(
            trace, step.schedule, may_move=True
        )
        # Ids are contiguous in the order of the framework's group.
        return np.argsort(np.array(self.topology.positions)[planned.placement.home], axis=1, kind="stable")

    def _check_choice(self) -> None:
        self._require_plans()
        if self._step is None or self._step.schedule is None:
            raise RuntimeError("renumber() without an order needs a step that this session has planned")
        if self._step.numbering != self.numbering:
            raise RuntimeError("the step was planned for weights of another numbering; plan it again")
        if not self._experts.knows_optimizers:
            raise InputError("renumber() needs the optimizers of the experts: register_optimizers()")
        if any(layer.expert_groups[0] > 1 for layer in self.homes):
            raise InputError("the planner's homes split groups of experts; give renumber() an order that keeps them")

    def _checked_order(self, order_LE: npt.ArrayLike, layers: Array) -> Array:
        try:
            order = np.asarray(order_LE)
        except ValueError:
            raise InputError("order_LE should have a row of as many ids for each layer") from None
        check_order(order, self._experts.shape, [layer.expert_groups[0] for layer in self.homes])
        if layers.shape != order.shape[:1] or len(np.unique(layers)) != len(layers):
            raise InputError(f"decoder_layers should be {len(order)} different numbers")
        if self.decoder_layers is not None and not np.array_equal(layers, self.decoder_layers):
            raise InputError(f"decoder_layers are {self.decoder_layers.tolist()} in this session")
        if self.rollout_placement is not None:
            raise InputError("renumber() can't follow counts of experts by id; take away session.rollout_placement")
        return order.astype(np.int64)

    def _to_permute(self, order_LE: Array, places_L: Sequence[ExpertPlaces]) -> list[list[torch.Tensor]]:
        self._experts.check_move(places_L)
        return [
            tensors_by_expert(layer) if (np.diff(order_E) != 1).any() else []
            for layer, order_E in zip(self.homes, order_LE, strict=True)
        ]

    def take_metrics(self) -> dict[str, float]:
        """This rank's counters since the last call. Not a collective.

        Returns:
            The figures of `Counters`, by their keys; `transfer/cpu_s`: CPU seconds of copying threads;
            `transfer/peer_memory_bytes`: memory of this rank that others of its node read replicas from, 0 if they get
            messages; `moe/replay_agreement`, if recorded rows were replayed: the part of them whose expert the router
            chose, too. If replicas are planned while the step runs: `plan/background_s`: seconds of planning and
            exchanging on the thread; `moe/planned_replicas`: of all slices so far; if all are there,
            `moe/planned_max_vio`: max/mean - 1 of rank loads, mean over instances, and `moe/max_vio_error`: that above
            the expectation in `PlanReport`. Of the last complete step: `plan/predicted_s` and `plan/measured_s`,
            without the optimizer; `plan/cost_scale`: factor of the planner's costs for the next;
            `plan/measured_gain`: of the best strategy over doing nothing, if that was measured; in mode `live`:
            `live/calls` of layers; `live/replicas` in them, and `live/used_replicas`, the part with rows;
            `live/max_vio_before` and `live/max_vio_after`, max/mean - 1 of rank loads without and with them, mean over
            calls; `live/choosing_s`, seconds of choosing.
        """
        metrics = self.counters.metrics() | {"transfer/cpu_s": self._experts.take_cpu_s()}
        metrics |= self._feedback.metrics() | {"transfer/peer_memory_bytes": self._experts.peer_memory_bytes}
        metrics |= {} if self._live is None else self._live.take_metrics()
        agreement = metrics.get("moe/replay_agreement", 1.0)
        if agreement < LEAST_AGREEMENT and not self._has_told_agreement:
            self._has_told_agreement = True
            logging.getLogger("trimtab").warning(
                "the router chooses only %.0f%% of the experts that were recorded; check that layers, tokens and "
                "weights are those of the recording", 100 * agreement
            )  # fmt: skip
        if self._step is not None and self._step.slices is not None:
            metrics |= self._step.slices.metrics()
        self.counters.clear()
        return metrics

    def whole_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state with the experts of all ranks, on every rank: for checkpoints, and for the weights of a
        rollout engine.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._lockstep.agree(WHOLE)
        return dict(self.whole.weights(model, everywhere=True))

    def dcp_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's state for `torch.distributed.checkpoint`, on all ranks. Stacks of experts are whole tensors
        `[E, ...]`, lists have the expert's id in place of the row in their names; all share the memory of the
        parameters.

        `save` it, or `load` it, which writes the parameters, on any number of ranks; then call `weights_changed`. A
        process without a session loads it as that of the whole model. Stacks are DTensors, `Shard(0)` over the
        expert-parallel group.

        Raises:
            InputError: if a layer was added with `weights`, or the names of a list have no expert number.
        """
        return self.whole.checkpoint(model)

    def sync_placement(self, step: int) -> Path | None:
        """Write the rollout engine's map of experts from the routing of all plans since the last call. Collective over
        all data ranks. Call it before the engine loads the weights of `step`, which is the step after these plans.

        Returns:
            The file, on the first rank; None on others, without `rollout_placement`, and if there was no plan.

        Raises:
            InputError: on all ranks, if the engine's ranks don't divide its experts.
            RanksDisagreeError: if ranks have other placements or steps.
            RuntimeError, OSError: on all ranks, if the file can't be written.
        """
        placement = self.rollout_placement
        same = {"step": step, "rollout_placement": placement and placement.state}
        self._lockstep.agree(SYNC_PLACEMENT, must_match=same, all_data_ranks=True)
        if placement is None:
            return None

        def over_ranks(counts: Array) -> Array:
            total = torch.from_numpy(counts)
            self._lockstep.wait(dist.all_reduce(total, group=self.topology.control, async_op=True).wait)
            return total.numpy()

        placement.make(step - 1, over_ranks)
        file, problem = attempt(placement.sync, step) if self.topology.data_rank == 0 else (None, None)
        self._lockstep.agree(SYNC_PLACEMENT, problem=problem, all_data_ranks=True)
        return file

    def state_in_order(self, holder: torch.nn.Module | torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of this rank that was saved, by an earlier version, while experts were on other ranks: with the
        rows that it should have, to be loaded. Others come back as they are.

        Args:
            holder: what it was saved of, with the session's experts.

        Raises:
            InputError: if it was saved on another number of ranks.
        """
        return state_in_order(holder, state, self.homes, self.topology)

    @property
    def whole(self) -> WholeState:
        """Weights and optimizer state of all ranks' experts, tensor by tensor, and loading of them.

        Raises:
            InputError: if a layer was added with `weights`.
        """
        self._experts.need_own("collect or load them")
        self._lockstep.need_groups()
        given = self.settings.expert_group
        group = self.topology.experts if given is None else inner_group(given)
        return WholeState(self.homes, group, self.weights_changed)

    def close(self) -> None:
        """Release threads and shared memory. Not needed before a process ends. Not a collective: other ranks may still
        read parameters (`peer_memory_bytes`), so write these after a barrier."""
        if self._step is not None and self._step.slices is not None:
            self._step.slices.end(0.0)
        self._experts.accumulation.leave()
        self._experts.close()
        self.topology.release()
