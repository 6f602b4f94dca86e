"""`balance`: the experts of a Megatron model in a `Session`; `MegatronSession` plans its steps."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import nn

from trimtab.array_type import Array
from trimtab.cluster.specs import AUTO
from trimtab.errors import InputError
from trimtab.integrations.megatron.balanced_layer import BalancedLayer
from trimtab.integrations.megatron.layer_numbers import moe_layers, number_layers
from trimtab.integrations.megatron.optimizer_state import MegatronState, optimizers_in
from trimtab.integrations.megatron.physical_dispatch import PlannedDispatcher
from trimtab.integrations.megatron.reduction_order import ReductionOrder
from trimtab.integrations.megatron.support import auxiliary_loss, check_supported, fitting_slots, warn_of_unknown
from trimtab.runtime import MicroStep, PlanReport, Session
from trimtab.runtime.session_settings import Mode
from trimtab.trace import RoutingTrace
from trimtab.trace.numbering import Numbering

Routing = Sequence[npt.ArrayLike]
"""For every micro-batch the recorded ids `[n, L, K]` of this rank's n tokens, in the order in which its MoE layers get
them (sequence, then batch); L is all MoE layers of the model, or those of this rank's model chunks."""


def balance(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    pg_collection: Any = None,
    slots_per_rank: int | str = AUTO,
    mode: Mode = "plan",
    nodes: Sequence[int] | None = None,
    routes_of_stage: bool = False,
    **options: Any,
) -> MegatronSession:
    """Balance the experts of a Megatron model. Call it when the model is built and loaded, before or after DDP.

    Parameters, their gradients, DDP buckets, optimizer and checkpoints stay Megatron's. Layers for multi-token
    prediction (MTP) run as without this call. A collective over the pipeline, the ranks that hold experts together, and
    their expert-data-parallel ranks.

    Args:
        model_chunks: the model of this rank, or its chunks in an interleaved pipeline, in order.
        pg_collection: Megatron's `ProcessGroupCollection`; the groups of `parallel_state` by default.
        slots_per_rank: most replicas of one layer on a rank, or `auto`; see `Session`. With HybridEP up to 3 more,
            where its kernels need them.
        mode: see `Session`. In `shadow` and `off` Megatron runs as without this call. `live` balances what
            `MegatronSession.live` runs, by any `policy` but `feplb`.
        nodes: the node number of each rank of the expert-parallel group, in its order; by host name by default.
        routes_of_stage: routing always has the layers of this rank alone. Then stages without MoE layers need not call,
            and a model that is not supported is refused on the stages that have its layers.
        options: others of `Session`.

    Raises:
        InputError: if the model has no MoE layers, is balanced already, or its configuration is not supported, on all
            stages of the pipeline; if the policy is `feplb`.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if "dispatcher" in options:
        raise InputError(
            "balance() has no option dispatcher any more: rows go by Megatron's own dispatcher; leave it out"
        )
    layers = moe_layers(chunks)
    if not layers and not any(getattr(getattr(chunk, "config", None), "num_moe_experts", None) for chunk in chunks):
        raise InputError("the model has no MoE layers; balance() is for models with Megatron's MoELayer")
    problem = ""
    try:
        if any(isinstance(layer.token_dispatcher, PlannedDispatcher) for layer in layers):
            raise InputError("the model is balanced already; call remove() of its MegatronSession first")
        if layers:
            check_supported(layers[0].config, layers, chunks)
    except InputError as error:
        problem = str(error)
    groups = pg_collection or get_default_pg_collection()
    pipeline = getattr(groups, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
    numbers = number_layers(layers, problem, None if routes_of_stage else pipeline)
    if not layers:
        return MegatronSession(None, chunks, [])
    config = layers[0].config
    warn_of_unknown(config, *(getattr(chunk, "ddp_config", None) for chunk in chunks))
    expert_dp = getattr(groups, "expt_dp", None) or parallel_state.get_expert_data_parallel_group()
    nodes = nodes if nodes is not None else _nodes(layers[0].ep_group)
    session = Session(
        num_experts=config.num_moe_experts, expert_group=layers[0].ep_group,
        expert_dp_group=expert_dp if expert_dp.size() > 1 else None,
        nodes=nodes, mode=mode, slots_per_rank=fitting_slots(layers[0], slots_per_rank, nodes), **options,
    )  # fmt: skip
    session.auxiliary_loss = partial(auxiliary_loss, config)
    balanced = [BalancedLayer(layer, numbers, session, groups) for layer in layers]
    session.decoder_layers = np.array([layer.decoder_layer for layer in balanced])
    return MegatronSession(session, chunks, balanced)


class MegatronSession:
    """The experts of a Megatron model in a session. Created by `balance`.

    Attributes:
        session: the session, for metrics and modes. Its own `plan`, `finish_gradients` and `renumber` are not used.
            None on a pipeline stage without MoE layers, where Megatron runs as without this object.
        report: the plan of the last step; None before the first, and without MoE layers. Its replicas are expected ones
            where they are planned while the step runs, see `PlanReport`.
    """

    def __init__(self, session: Session | None, chunks: Sequence[nn.Module], layers: Sequence[BalancedLayer]) -> None:
        self.session = session
        self._chunks, self._layers = list(chunks), list(layers)
        self._optimizer: Any = None
        self.report: PlanReport | None = None
        self._is_removed = False
        self._orders: dict[int, ReductionOrder] = {}

    def planned(
        self,
        forward_backward: Callable[..., Any],
        routing: Routing,
        *,
        unread: Sequence[npt.ArrayLike] | None = None,
        may_deviate: bool = False,
        problem: InputError | None = None,
        numbering: Numbering | None = None,
    ) -> Callable[..., Any]:
        """Megatron's forward-backward function with a plan: `session.planned(get_forward_backward_func(), routing)`.

        Call the result with Megatron's arguments, on all ranks, with `forward_only` too. The step is planned when it is
        called. The function may be any of Megatron's schedules: without pipeline, 1F1B, interleaved.

        Args:
            routing: recorded routing of the micro-batches, in order.
            unread: for every micro-batch a mask `[n]` bool of tokens whose output nothing uses; see
                `Session.plan_micro_steps`.
            may_deviate: this rank's routers may choose other experts than `router_replay` gives them, as many for each
                token; see `Session.micro_step`.
            problem: the caller's reason why this rank has no routing; it is raised on all ranks.
            numbering: `session.numbering` when the routing was recorded; needed once the session has renumbered.
        """

        def run(*, num_microbatches: int, **others: Any) -> Any:
            self.plan(routing, num_microbatches, unread=unread, problem=problem, numbering=numbering)
            session, numbers = self.session, range(num_microbatches)
            steps = [] if session is None else [session.micro_step(i, may_deviate=may_deviate) for i in numbers]
            return self._run(forward_backward, steps, num_microbatches=num_microbatches, **others)

        return run

    def live(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's forward-backward function in live micro-steps, which mode `live` balances without recorded
        routing: `session.live(get_forward_backward_func())`. In other modes Megatron runs as without this object.

        Call the result as that of `planned`.
        """

        def run(*, num_microbatches: int, **others: Any) -> Any:
            self._need_model()
            self._gather_parameters()
            session = self.session
            if session is not None:
                # Megatron's optimizers write to parameters in ways that don't show.
                session.weights_changed()
            steps = [] if session is None else [session.live_micro_step() for _ in range(num_microbatches)]
            return self._run(forward_backward, steps, num_microbatches=num_microbatches, **others)

        return run

    def _run(
        self,
        forward_backward: Callable[..., Any],
        steps: Sequence[MicroStep],
        *,
        forward_step_func: Callable[..., Any],
        **others: Any,
    ) -> Any:
        """Run Megatron's function with the forwards of every micro-batch, one for each chunk, in its micro-step.

        Args:
            steps: by micro-batch; empty without MoE layers.
        """
        self._order_reductions(others.get("model"))
        if not steps:
            return forward_backward(forward_step_func=forward_step_func, **others)
        forwards: dict[int, int] = {}

        def forward_step(data_iterator: Any, model: Any, *more: Any, **named: Any) -> Any:
            index = forwards.get(id(model), 0)
            forwards[id(model)] = index + 1
            with steps[index]:
                return forward_step_func(data_iterator, model, *more, **named)

        return forward_backward(forward_step_func=forward_step, **others)

    def _need_model(self) -> None:
        """Raises InputError after `remove`."""
        if self._is_removed:
            raise InputError("the session was removed from its model; call balance() again")

    def plan_ahead(self, trace: RoutingTrace, *, token_budget: int) -> None:
        """Choose a strategy for the next step from its finished sequences, while others generate.

        See `Session.plan_ahead`. Call it equally often on all ranks.

        Args:
            trace: finished sequences, the same or others on each rank, with all MoE layers of the model or those of
                this rank.
            token_budget: most tokens of a rank in a micro-batch.

        Raises:
            InputError: if the trace does not fit the model, or has no hashes.
        """
        if self.session is None:
            return
        numbers = [layer.number for layer in self._layers]
        if trace.num_layers == self._layers[0].layers_of_model:
            trace = replace(trace, expert_ids=trace.expert_ids[:, numbers], layer_indices=trace.layer_indices[numbers])
        self.session.plan_ahead(trace, token_budget=token_budget)

    def plan(
        self,
        routing: Routing,
        num_microbatches: int,
        *,
        unread: Sequence[npt.ArrayLike] | None = None,
        problem: InputError | None = None,
        numbering: Numbering | None = None,
    ) -> PlanReport | None:
        """Plan a step; `planned` calls it. Returns None on a pipeline stage without MoE layers.

        Raises:
            InputError: if the routing does not fit the micro-batches or the model; if `unread` is given to a model with
                an auxiliary loss, a z-loss or a bias by expert; in mode `live`.
        """
        self._need_model()
        if self.session is not None and self.session.mode == "live":
            raise InputError("nothing is planned in mode 'live'; call live() in place of planned()")
        rows: list[Array] = []
        try:
            rows = self._rows(routing, num_microbatches) if problem is None else []
        except InputError as error:
            problem = error
        self._gather_parameters()
        if self.session is None:
            if problem is not None:
                raise problem
            return None
        self.report = self.session.plan_micro_steps(rows, unread=unread, problem=problem, numbering=numbering)
        return self.report

    def register_optimizer(self, optimizer: Any) -> None:
        """Let `renumber` permute the optimizer's state of experts and routers. Not a collective.

        Args:
            optimizer: Megatron's, of all chunks.

        Raises:
            InputError: if its state can't be permuted.
        """
        optimizers = optimizers_in(optimizer)
        if self._optimizer is not None:
            raise InputError("an optimizer is registered already; call balance() again for another one")
        if self.session is None:
            return
        self._optimizer = optimizer
        warn_of_unknown(*(one.config for one in optimizers))
        state = MegatronState(optimizers, self.session.topology, self.session.homes)
        self.session.set_framework_state(state)
        optimizer.step = _followed_by(optimizer.step, state.note_step)

    @property
    def numbering(self) -> Numbering | None:
        """Of this rank's layers: give it to `planned` with what is recorded from now on. None before `renumber`."""
        return None if self.session is None else self.session.numbering

    def renumber(self, order_LE: npt.ArrayLike | None = None) -> bool:
        """Give the experts of each layer other ids, between optimizer step and next forward: weights, the routers' rows
        and biases, and the optimizer's state of these. See `Session.renumber`; `register_optimizer` comes first.

        The model is then a plain one: checkpoints, exports and weight syncs need nothing. Collective over the ranks of
        a pipeline stage.

        Args:
            order_LE: `[L, E]`, of each new id the id now, of this rank's L MoE layers.

        Returns:
            Whether any expert of this rank's layers has another id.
        """
        self._need_model()
        if self.session is None:
            return False
        self._gather_parameters()
        return self.session.renumber(order_LE)

    def take_metrics(self) -> dict[str, float]:
        """See `Session.take_metrics`."""
        return {} if self.session is None else self.session.take_metrics()

    def remove(self) -> None:
        """Give the model back as it was. Call it between steps, on all ranks."""
        if not self._is_removed:
            if self._optimizer is not None:
                del self._optimizer.step
            for order in self._orders.values():
                order.remove()
            for layer in self._layers:
                layer.remove()
            if self.session is not None:
                self.session.close()
            self._is_removed = True

    def _rows(self, routing: Routing, num_microbatches: int) -> list[Array]:
        """The ids of this rank's layers, for every micro-batch."""
        if len(routing) != num_microbatches:
            raise InputError(
                f"routing was recorded for {len(routing)} micro-batches, and the step has {num_microbatches}; give the "
                "ids of every micro-batch of this rank"
            )
        return [self._of_stage(np.asarray(ids), index) for index, ids in enumerate(routing)]

    def _of_stage(self, ids: Array, index: int) -> Array:
        """The ids of this rank's layers."""
        if ids.ndim != 3:
            raise InputError(
                f"the routing of micro-batch {index} has shape {list(ids.shape)}, not [tokens, layers, top_k]"
            )
        if not self._layers:
            return ids
        numbers = [layer.number for layer in self._layers]
        total = self._layers[0].layers_of_model
        if ids.shape[1] == len(numbers):
            return ids
        if ids.shape[1] == total:
            return ids[:, numbers]
        raise InputError(
            f"the routing of micro-batch {index} has {ids.shape[1]} layers; it should have the {total} MoE layers of "
            f"the model or the {len(numbers)} of this rank"
        )

    def _gather_parameters(self) -> None:
        """Complete the parameters that a distributed optimizer has updated in parts."""
        for chunk in self._chunks:
            ddp: Any = chunk
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
                for bucket_group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                    bucket_group.start_param_sync(force_sync=True)

    def _order_reductions(self, model: Any) -> None:
        """Let all ranks reduce expert gradients in the same order. The model may have been wrapped after `balance`."""
        for ddp in model if isinstance(model, list) else [model]:
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.overlap_grad_reduce and id(ddp) not in self._orders:
                self._orders[id(ddp)] = ReductionOrder(ddp.expert_parallel_bucket_groups)


def _followed_by(call: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    return both


def _nodes(group: dist.ProcessGroup) -> list[int] | None:
    """The node of each rank of a group, by host name; None if they have different numbers of ranks."""
    names: list[str] = [""] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    if len({names.count(name) for name in names}) > 1:
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
