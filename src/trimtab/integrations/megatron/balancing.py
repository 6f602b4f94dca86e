"""`balance`: the experts of a Megatron model in a `Session`; `MegatronSession` plans its steps."""

from __future__ import annotations

import operator
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.megatron.experts import Experts, experts_of
from trimtab.integrations.megatron.logical_order import (
    ADVICE,
    NamedTensor,
    PositionalGuard,
    logical_shards,
    rename_experts,
)
from trimtab.integrations.megatron.optimizer_state import MegatronState, optimizers_in
from trimtab.integrations.megatron.physical_dispatch import (
    MegatronRows,
    PlannedDispatcher,
    TrimtabRows,
    physical_dispatcher,
)
from trimtab.integrations.megatron.reduction_order import ReductionOrder
from trimtab.integrations.megatron.replay import SessionReplay
from trimtab.integrations.megatron.support import check_slots, check_supported
from trimtab.planner import Placement
from trimtab.runtime import PlanReport, Session
from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.planning import Mode
from trimtab.trace import RoutingTrace

Routing = Sequence[npt.ArrayLike]
"""For every micro-batch the recorded ids `[n, L, K]` of this rank's n tokens, in the order in which its MoE layers get
them (sequence, then batch); L is all MoE layers of the model, or those of this rank's model chunks."""


def balance(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    pg_collection: Any = None,
    slots_per_rank: int = 2,
    mode: Mode = "plan",
    dispatcher: Literal["megatron", "trimtab"] = "megatron",
    nodes: Sequence[int] | None = None,
    **options: Any,
) -> MegatronSession:
    """Balance the experts of a Megatron model. Call it when the model is built and loaded, before or after DDP.

    Parameters, their gradients, DDP buckets, optimizer and checkpoints stay Megatron's. Experts keep their homes until
    `register_optimizer` was called. A collective over the ranks of this pipeline stage that hold experts together, and
    their expert-data-parallel ranks.

    Args:
        model_chunks: the model of this rank, or its chunks in an interleaved pipeline, in order.
        pg_collection: Megatron's `ProcessGroupCollection`; the groups of `parallel_state` by default.
        slots_per_rank: most replicas of one layer on a rank.
        mode: see `Session`. In `shadow` and `off` Megatron runs as without this call. `rehome` needs an optimizer.
        dispatcher: `megatron` sends rows by Megatron's own dispatcher, built for physical experts: all-to-all, or flex
            with DeepEP or HybridEP; `trimtab` by ours.
        nodes: the node number of each rank of the expert-parallel group, in its order; by host name by default.
        options: others of `Session`.

    Raises:
        InputError: if the model has no MoE layers, is balanced already, or its configuration is not supported.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    if not layers:
        if not any(getattr(getattr(chunk, "config", None), "num_moe_experts", None) for chunk in chunks):
            raise InputError("the model has no MoE layers; balance() is for models with Megatron's MoELayer")
        return MegatronSession(None, chunks, [])
    if any(isinstance(layer.token_dispatcher, PlannedDispatcher) for layer in layers):
        raise InputError("the model is balanced already; call remove() of its MegatronSession first")
    if dispatcher not in ("megatron", "trimtab"):
        raise InputError(f"dispatcher is {dispatcher!r}; it should be one of megatron, trimtab")
    config = layers[0].config
    check_supported(config, layers, chunks)
    if dispatcher == "megatron":
        check_slots(layers[0], slots_per_rank)
    groups = pg_collection or get_default_pg_collection()
    expert_dp = getattr(groups, "expt_dp", None) or parallel_state.get_expert_data_parallel_group()
    session = Session(
        num_experts=config.num_moe_experts, expert_group=layers[0].ep_group,
        expert_dp_group=expert_dp if expert_dp.size() > 1 else None,
        nodes=nodes if nodes is not None else _nodes(layers[0].ep_group), mode=mode, slots_per_rank=slots_per_rank,
        **options,
    )  # fmt: skip
    balanced = [_BalancedLayer(layer, session, groups, dispatcher) for layer in layers]
    return MegatronSession(session, chunks, balanced)


class MegatronSession:
    """The experts of a Megatron model in a session. Created by `balance`.

    Attributes:
        session: the session, for metrics and modes. Its own `plan`, `finish_gradients` and `move` are not used. None on
            a pipeline stage without MoE layers, where Megatron runs as without this object.
        report: the plan of the last step; None before the first, and without MoE layers.
    """

    def __init__(self, session: Session | None, chunks: Sequence[nn.Module], layers: Sequence[_BalancedLayer]) -> None:
        self.session = session
        self.report: PlanReport | None = None
        self._chunks, self._layers = list(chunks), list(layers)
        self._is_removed = False
        self._optimizer: Any = None
        self._guard: PositionalGuard | None = None
        self._replaced: list[tuple[Any, str]] = []
        self._gradients_wait = self._is_exporting = False
        self._orders: dict[int, ReductionOrder] = {}
        for layer in self._layers:
            layer.before_backward = self._note_gradients
            layer.is_exported = lambda: self._is_exporting

    def register_optimizer(self, optimizer: Any) -> None:
        """Let plans move experts to other homes, with the optimizer's state of them. Not a collective.

        Moves are made when a step is planned, if no gradients wait for an optimizer step.

        Args:
            optimizer: Megatron's, of all chunks.

        Raises:
            InputError: if experts can't move with its state.
        """
        optimizers = optimizers_in(optimizer)
        if self._optimizer is not None:
            raise InputError("an optimizer is registered already; call balance() again for another one")
        self._optimizer = optimizer
        if self.session is None:
            return
        self.session.set_framework_state(MegatronState(optimizers, self.session.topology, lambda: self._gradients_wait))
        # Gradients are used by a step, or dropped.
        for owner, name in ((optimizer, "step"), *((chunk, "zero_grad_buffer") for chunk in self._chunks)):
            if hasattr(owner, name):
                setattr(owner, name, self._clearing(getattr(owner, name)))
                self._replaced.append((owner, name))
        self._guard = PositionalGuard(optimizer, lambda: self.have_moved)

    def move(self, placement: Placement) -> None:
        """Move all experts to given homes, with the optimizer's state of them, between steps. Plans include moves.
        Collective over the ranks of the expert-parallel groups; nothing on a pipeline stage without MoE layers.

        Args:
            placement: homes `[L, E]` of this rank's L MoE layers, by rank number of the session.

        Raises:
            InputError: if no optimizer is registered, or ranks would have different numbers of experts.
            RuntimeError: if gradients wait for an optimizer step.
        """
        if self.session is None or np.array_equal(placement.home, self.session.placement.home):
            return
        if self._optimizer is None:
            raise InputError("experts move with their optimizer state; call register_optimizer() first")
        self._gather_parameters()
        self.session.move(placement)

    @property
    def have_moved(self) -> bool:
        """Whether experts of this rank's layers are elsewhere than Megatron has them."""
        return any(layer.experts_by_position is not None for layer in self._layers)

    def logical_names(self, pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yields exported weights with the logical numbers of their experts, for any exporter of Megatron models.

        Exporters number experts by rank and place on it. Put this around what they yield, in every weight sync:
        `session.logical_names(bridge.export_hf_weights(model))`. Collective over the ranks of the pipeline.

        Args:
            pairs: names, Megatron's or Hugging Face's, and tensors. Layers are numbered in the whole model. Experts are
                numbered in all ranks, or one tensor has all of a layer.

        Raises:
            InputError: if the name or the tensor of an expert can't be understood.
            RuntimeError: if experts move before the last pair was read.
        """
        return self.weight_sync()(pairs)

    def weight_sync(self) -> Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]:
        """`logical_names` for exporters that yield lists, and not as many on every rank, as slime's.

        Collective over the ranks of the pipeline. What it returns is not: call that for each list of one weight sync.

        Raises:
            InputError, RuntimeError: from what is returned, as `logical_names` does.
        """
        orders = self._orders_of_experts
        mine = {
            layer.decoder_layer: experts_E
            for layer, experts_E in zip(self._layers, orders, strict=True)
            if experts_E is not None
        }
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        found = [mine]
        if pipeline.size() > 1:
            found = [{}] * pipeline.size()
            dist.all_gather_object(found, mine, group=pipeline)
        experts_of_layer = {number: experts for part in found for number, experts in part.items()}

        def renamed(pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
            for pair in rename_experts(self._exported(pairs), experts_of_layer):
                if any(map(operator.is_not, self._orders_of_experts, orders)):
                    raise RuntimeError("experts have moved since this weight sync began; begin it again")
                yield pair

        return renamed

    def _exported(self, pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The pairs of an exporter, which may call `state_dict()` of the model, as verl's does for its names."""
        exporter = iter(pairs)
        while True:
            self._is_exporting = True
            try:
                pair = next(exporter, None)
            finally:
                self._is_exporting = False
            if pair is None:
                return
            yield pair

    @property
    def _orders_of_experts(self) -> list[Array | None]:
        """For each layer the expert at each position: another array after a move."""
        return [layer.experts_by_position for layer in self._layers]

    def return_home(self) -> None:
        """Move all experts to the ranks on which Megatron has them; see `move`."""
        if self.session is not None:
            self.move(self.session.topology.initial_placement(len(self._layers), self.session.num_experts))

    def _note_gradients(self) -> None:
        self._gradients_wait = True

    def _clearing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clear(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._gradients_wait = False
            return result

        return clear

    def planned(self, forward_backward: Callable[..., Any], routing: Routing) -> Callable[..., Any]:
        """Megatron's forward-backward function with a plan: `session.planned(get_forward_backward_func(), routing)`.

        Call the result with Megatron's arguments, on all ranks, with `forward_only` too. The step is planned when it is
        called. The function may be any of Megatron's schedules: without pipeline, 1F1B, interleaved.

        Args:
            routing: recorded routing of the micro-batches, in order.
        """

        def run(*, forward_step_func: Callable[..., Any], num_microbatches: int, **others: Any) -> Any:
            self.plan(routing, num_microbatches)
            self._order_reductions(others.get("model"))
            session = self.session
            if session is None:
                return forward_backward(
                    forward_step_func=forward_step_func, num_microbatches=num_microbatches, **others
                )
            steps = [session.micro_step(index) for index in range(num_microbatches)]
            forwards: dict[int, int] = {}

            def forward_step(data_iterator: Any, model: Any, *more: Any, **named: Any) -> Any:
                index = forwards.get(id(model), 0)
                forwards[id(model)] = index + 1
                with steps[index]:
                    return forward_step_func(data_iterator, model, *more, **named)

            return forward_backward(forward_step_func=forward_step, num_microbatches=num_microbatches, **others)

        return run

    def plan_ahead(self, trace: RoutingTrace, *, token_budget: int) -> None:
        """Plan homes and strategy of the next step from its finished sequences, while others generate.

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

    def plan(self, routing: Routing, num_microbatches: int) -> PlanReport | None:
        """Plan a step; `planned` calls it. Returns None on a pipeline stage without MoE layers.

        Raises:
            InputError: if the routing does not fit the micro-batches or the model.
        """
        if self._is_removed:
            raise InputError("the session was removed from its model; call balance() again")
        rows: list[Array] = []
        problem = None
        try:
            rows = self._rows(routing, num_microbatches)
        except InputError as error:
            problem = error
        if self.session is None:
            if problem is not None:
                raise problem
            return None
        self._gather_parameters()
        self.report = self.session.plan_micro_steps(rows, problem=problem)
        return self.report

    def take_metrics(self) -> dict[str, float]:
        """See `Session.take_metrics`."""
        return {} if self.session is None else self.session.take_metrics()

    def remove(self) -> None:
        """Give the model back as it was, with all experts on Megatron's ranks. Call it between steps, on all ranks."""
        if not self._is_removed:
            self.return_home()
            if self._guard is not None:
                self._guard.remove()
            for owner, name in self._replaced:
                delattr(owner, name)
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

    def _order_reductions(self, model: Any) -> None:
        """Let all ranks reduce expert gradients in the same order. The model may have been wrapped after `balance`."""
        for ddp in model if isinstance(model, list) else [model]:
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.overlap_grad_reduce and id(ddp) not in self._orders:
                self._orders[id(ddp)] = ReductionOrder(ddp.expert_parallel_bucket_groups)

    def _gather_parameters(self) -> None:
        """Complete the parameters of experts that a distributed optimizer has updated in parts."""
        for chunk in self._chunks:
            ddp: Any = chunk
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
                for bucket_group in ddp.expert_parallel_bucket_groups:
                    bucket_group.start_param_sync(force_sync=True)


class _BalancedLayer:
    """One MoE layer of the model, with what `balance` has replaced in it.

    Attributes:
        number: its number among all MoE layers of the model, from 0.
        layers_of_model: MoE layers of the model.
    """

    def __init__(self, moe_layer: MoELayer, session: Session, groups: Any, dispatcher: str) -> None:
        self._moe_layer = moe_layer
        experts = experts_of(moe_layer.experts)
        assert experts is not None
        self._experts: Experts = experts
        self._layer: FrameworkLayer = session.add_framework_layer(experts.tensors)
        pattern = _moe_pattern(moe_layer.config)
        self.number = sum(pattern[: moe_layer.layer_number - 1])
        self.layers_of_model = sum(pattern)
        replay = SessionReplay(self._layer, moe_layer.router.router_replay, lambda: session.settings.executes_plans)
        start = TrimtabRows.start
        if dispatcher == "megatron":
            physical = physical_dispatcher(moe_layer, session.slots_per_rank, session.topology.positions, groups)
            start = partial(MegatronRows.start, physical)  # type: ignore[assignment]
        self._dispatcher = PlannedDispatcher(moe_layer, self._layer, replay, start)
        self._compute_homes = moe_layer.experts.forward
        moe_layer.router.router_replay = replay
        moe_layer.token_dispatcher = self._dispatcher
        moe_layer.experts.forward = self._compute
        self.before_backward: Callable[[], None] = lambda: None
        self.is_exported: Callable[[], bool] = lambda: False
        self.decoder_layer = moe_layer.layer_number - 1
        self._sharded_state_dict = moe_layer.experts.sharded_state_dict
        moe_layer.experts.sharded_state_dict = self._logical_state_dict
        self._hooks = [
            moe_layer.experts._register_state_dict_hook(self._refuse_state_dict),
            moe_layer.experts.register_load_state_dict_pre_hook(self._refuse_state_dict),
        ]

    @property
    def experts_by_position(self) -> Array | None:
        """The expert `[E]` at each position of Megatron's expert-parallel group; None if it is the position itself."""
        return self._dispatcher.experts_by_position

    def remove(self) -> None:
        """Undo all replacements."""
        self._moe_layer.router.router_replay = self._moe_layer.router.router_replay.plain
        self._moe_layer.token_dispatcher = self._dispatcher.plain
        del self._moe_layer.experts.forward
        del self._moe_layer.experts.sharded_state_dict
        for hook in self._hooks:
            hook.remove()

    def _logical_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Replaces the `sharded_state_dict` of the experts' module: experts have their logical place."""
        shards: dict[str, Any] = self._sharded_state_dict(prefix, sharded_offsets, metadata)
        experts_E = self.experts_by_position
        if experts_E is not None:
            if (metadata or {}).get("singleton_local_shards"):
                raise InputError(f"singleton_local_shards names experts by position, and they have moved; {ADVICE}")
            rows = [[prefix + name for name in names] for names in self._experts.names()]
            first = self._moe_layer.ep_group.rank() * len(rows)
            positions = np.arange(first, first + len(rows))
            logical_shards(shards, rows, len(sharded_offsets), experts_E[positions] - positions)
        return shards

    def _refuse_state_dict(self, *_: Any) -> None:
        if self.experts_by_position is not None and not self.is_exported():
            raise InputError(
                f"a state_dict of layer {self.decoder_layer} has experts by position, and they have moved; use "
                f"sharded_state_dict(), or {ADVICE}"
            )

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Replaces the forward of the experts' module: home experts, then replicas."""
        if torch.is_grad_enabled():
            self.before_backward()
        outputs, bias = self._compute_homes(rows, counts, probs)
        call = self._dispatcher.rows
        if call is None or not call.instance.replicas.count:
            return outputs, bias
        replica_rows, replicas = self._layer.use_replicas(call.replica_rows, call.instance)
        if replicas.count:
            with replicas.saved_for_backward():
                replica_rows = self._experts.compute(
                    replica_rows, call.instance.layout.replica_groups.counts, call.replica_probs, replicas.tensors
                )
        return call.join(outputs, replica_rows), bias


def _moe_pattern(config: Any) -> list[int]:
    """For every layer of the model 1 if it is a MoE layer, else 0; as Megatron reads `moe_layer_freq`."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(config.num_layers)]
    return list(frequency)


def _nodes(group: dist.ProcessGroup) -> list[int] | None:
    """The node of each rank of a group, by host name; None if they have different numbers of ranks."""
    names: list[str] = [""] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    if len({names.count(name) for name in names}) > 1:
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
