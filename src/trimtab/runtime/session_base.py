"""`SessionBase`: settings, ranks, layers and experts of a session, which all its parts share."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime.feedback import Feedback
from trimtab.runtime.layer.dispatch import Dispatcher, RowDispatcher
from trimtab.runtime.layer.framework_layer import FrameworkLayer
from trimtab.runtime.layer.layer import ExpertLayer, HomeWeights
from trimtab.runtime.layer.layer_call import LayerCalls
from trimtab.runtime.planning.background_slices import COMPARED
from trimtab.runtime.program.grouped_products import ApplyExperts
from trimtab.runtime.program.physical_experts import PhysicalExperts
from trimtab.runtime.rank_experts import RankExperts
from trimtab.runtime.ranks.lockstep import Lockstep
from trimtab.runtime.ranks.process_groups import tell_wrong_variables
from trimtab.runtime.session_settings import Mode, Paths, SessionSettings
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.home_experts import ByExpert, ExpertTensor, HomeExperts, ReadParameters, read_tensors
from trimtab.runtime.state.owners import find_owners
from trimtab.runtime.state.renumbering import OnRenumber, numberings
from trimtab.runtime.transfer.counters import Counters
from trimtab.runtime.transfer.transfers import Transfers
from trimtab.trace.numbering import Numbering

if TYPE_CHECKING:
    from trimtab.planner.rollout_placement import RolloutPlacement


class SessionBase:
    """What all parts of a `Session` share.

    Attributes:
        settings: the arguments; replace them to change values between steps.
        topology: process groups, and this rank's numbers in them.
        layers: the layers that a model of torch modules calls, in the order of `add_layer`.
        counters: counts what `Session.take_metrics` reports.
        decoder_layers: `[L]`, the layers of the model that the session's are, as traces and numberings count them; None
            for 0 to L - 1. Integrations set them, and the first `renumber`.
        rollout_placement: counts the routing of every plan, for `Session.sync_placement`; None by default.
        auxiliary_loss: returns the model options that make a loss or a bias depend on the routes of all tokens; empty
            if there are none. Set by integrations, which know the model.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.topology = settings.topology()
        if self.topology.rank == 0 and "nccl" in dist.get_backend(self.topology.experts):
            tell_wrong_variables()
        num_experts, num_slots = settings.num_experts, settings.slot_numbers[-1]
        self.layers: list[ExpertLayer] = []
        self.auxiliary_loss: Callable[[], str] = str
        self.rollout_placement: RolloutPlacement | None = None
        self._numbering: Numbering | None = None
        self.decoder_layers: Array | None = None
        self._on_renumber: list[OnRenumber] = []
        self._initial_E: Array = self.topology.initial_placement(1, num_experts).home[0]
        places = ExpertPlaces.at(self._initial_E)
        self._physical = PhysicalExperts.of(places, self.topology.rank, self.topology.positions, num_slots)
        self._lockstep = Lockstep(
            self.topology, num_experts=num_experts, slots_per_rank=num_slots,
            max_values=max(self._physical.count, 4 + COMPARED),
        )  # fmt: skip
        self._lockstep.resume = lambda: self.topology.take_groups(self.settings.topology())
        self.counters = Counters(lockstep=self._lockstep)
        self._experts = RankExperts(settings, self.topology, self._lockstep, self.counters)
        self._calls = LayerCalls(
            self.topology, self._lockstep, self.counters, self._experts.backward, self._experts.accumulation,
            self._experts.gradients, self._physical,
        )  # fmt: skip
        self._feedback = Feedback()
        # Names of replicated parameters, in errors.
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        # Whether `replicated_parameters` has left out DTensors.
        self._has_dtensors = False
        self._experts.at_backward_end = self._feedback.mark

    @property
    def mode(self) -> Mode:
        """The mode; see `Session`. It can be changed between steps."""
        return self.settings.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.settings = replace(self.settings, mode=mode)

    @property
    def paths(self) -> Paths:
        """Sources of replicas' weights; see `Session`. It can be changed between steps."""
        return self.settings.paths

    @paths.setter
    def paths(self, paths: Paths) -> None:
        self.settings = replace(self.settings, paths=paths)

    @property
    def numbering(self) -> Numbering | None:
        """Of the weights that the model has now, in later sessions of the model, too; None if it was never renumbered.

        Assign that of a renumbered checkpoint, `Numbering.of_checkpoint(folder)`, and, while older weights stand in for
        the model's to replay recorded ids, the numbering of these.
        """
        return self._numbering

    @numbering.setter
    def numbering(self, numbering: Numbering | None) -> None:
        self._numbering = numbering
        self._record_numbering()

    def _record_numbering(self) -> None:
        """Let later sessions of the experts, as they are now, know the numbering."""
        numbers = range(len(self.homes)) if self.decoder_layers is None else self.decoder_layers.tolist()
        for layer, number in zip(self.homes, numbers, strict=False):
            numberings.update(dict.fromkeys(layer.parameters, (self._numbering, number)))

    @property
    def num_experts(self) -> int:
        """Experts of a layer, E."""
        return self.settings.num_experts

    @property
    def slots_per_rank(self) -> int:
        """Most replicas of one layer on a rank; with `auto` of any number that may be chosen."""
        return self.settings.slot_numbers[-1]

    @property
    def homes(self) -> list[HomeExperts]:
        """This rank's experts of each layer."""
        return self._experts.layers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers; see `register_optimizers`."""
        return self._experts.optimizers.registered

    @property
    def rank(self) -> int:
        """This rank's number in its expert-parallel group."""
        return self.topology.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of an expert-parallel group, R."""
        return self.topology.num_ranks

    @property
    def placement(self) -> Placement:
        """The homes of all experts."""
        return self._experts.placement

    @property
    def home_experts(self) -> Array:
        """Ids `[E / R]` of this rank's home experts, ascending."""
        return np.flatnonzero(self._initial_E == self.rank)

    def add_layer(
        self,
        parameters: Sequence[ExpertTensor] | ReadParameters,
        apply: ApplyExperts,
        *,
        compute_dtype: torch.dtype | None = None,
        weights: HomeWeights | None = None,
        dispatcher: Dispatcher | None = None,
        by_expert: ByExpert | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> ExpertLayer:
        """Add the next MoE layer. Not a collective.

        Args:
            parameters: the tensors of this rank's `home_experts`, each a stacked Parameter `[E / R, ...]` or a sequence
                of E / R Parameters `[...]` in the order of `home_experts`; or a function that returns them, which is
                called whenever they are needed. Train them with an elementwise optimizer, and keep them out of FSDP.
                Their memory may be replaced at any time outside micro-steps. Sequences are never stacked.
            apply: computes experts on grouped rows; see `gated_experts`.
            compute_dtype: compute dtype; that of the parameters by default (float32 masters, bfloat16 compute).
            weights: returns the same experts `[E / R, ...]`, in the graph, each time that the layer runs, for experts
                that a framework trains, such as FSDP. Their gradients, including those of replicas, are complete when
                the layer's backward ends. `parameters` are then only read, and experts are not renumbered.
            dispatcher: sends rows to physical experts and back; `RowDispatcher` by default.
            by_expert: tensors `[E, ...]` of the layer that every rank holds, such as the router's weight and biases, or
                a function that returns them; `renumber` needs them.
            refresh: brings `parameters` up to date with the weights that they are copies of, when any rank's have
                changed; called by all data ranks at a micro-step's start, so it may be a collective. With `weights`.

        Raises:
            InputError: if a tensor does not hold E / R experts, experts differ in shape from other layers' or within a
                sequence, another layer has one of the tensors, `weights` is given with sequences, or `refresh` without
                `weights`.
        """
        read: ReadParameters = parameters if callable(parameters) else partial(tuple, parameters)
        if weights is not None and not all(isinstance(tensor, torch.Tensor) for tensor in read_tensors(read)):
            raise InputError(
                f"MoE layer {len(self.homes)}: experts that a framework trains (`weights`) should be stacks"
            )
        if refresh is not None and weights is None:
            raise InputError(f"MoE layer {len(self.homes)}: `refresh` needs `weights`, since copies are not trained")
        homes = self._experts.add_layer(
            read, self._initial_E, compute_dtype=compute_dtype, joins_in_backward=weights is not None, refresh=refresh
        )
        homes.by_expert = by_expert
        find_owners([tensor for tensor in homes.declared if isinstance(tensor, torch.nn.Parameter)])
        self._take_numbering(homes)
        layer = ExpertLayer(self._calls, homes, apply, weights, dispatcher or RowDispatcher())
        self.layers.append(layer)
        return layer

    def add_framework_layer(
        self,
        parameters: ReadParameters,
        *,
        dispatch_forwards: bool = False,
        expert_groups: tuple[int, int] = (1, 1),
        equal_tokens: str = "",
        by_expert: ByExpert | None = None,
    ) -> FrameworkLayer:
        """Add the next MoE layer, which a framework's own dispatcher and matrix products run. Not a collective.

        Live micro-steps balance it with any policy but `feplb`, whose second dispatch a framework does not have.
        They are renumbered only after `set_framework_state`. Gradients of replicas are joined to those of `parameters`
        in backward; the framework sums and clips them.

        Args:
            parameters: returns the tensors of this rank's `home_experts`, each a sequence of E / R Parameters `[...]`;
                called whenever they are needed.
            dispatch_forwards: whether the dispatcher sends a token to a node once and on from there, as DeepEP does; by
                default every row is sent to its rank. Plans minimise the time of what is sent.
            expert_groups: groups of experts, and to how many of them the router limits a token's; see `ModelSpec`.
            equal_tokens: the name of a dispatcher that needs the same number of tokens on all ranks; micro-steps with
                others raise RanksDisagreeError.
            by_expert: see `add_layer`.

        Raises:
            InputError: as `add_layer`, and if the policy is `feplb`.
        """
        if self.settings.policy == "feplb":
            raise InputError(
                "policy 'feplb' sends rows in a second dispatch, which a framework's own dispatcher does not have; use "
                "'quota' or 'off'"
            )
        homes = self._experts.add_layer(parameters, self._initial_E, joins_in_backward=True)
        homes.sends_rows, homes.dispatch_forwards, homes.expert_groups = False, dispatch_forwards, expert_groups
        homes.equal_tokens, homes.by_expert = equal_tokens, by_expert
        self._take_numbering(homes)
        return FrameworkLayer(self._calls, homes)

    def _take_numbering(self, homes: HomeExperts) -> None:
        """Take over the numbering of experts that an earlier session has renumbered, and their decoder layers if all
        are."""
        if homes.parameters[0] in numberings:
            self._numbering, number = numberings[homes.parameters[0]]
            before = np.empty(0, np.int64) if self.decoder_layers is None else self.decoder_layers
            if len(before) == homes.index:
                self.decoder_layers = np.append(before, number)

    def replicated_parameters(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The model's parameters that every rank holds: all but the experts, and DTensors of FSDP. Not a collective.

        Raises:
            InputError: if the model does not have the session's experts.
        """
        experts = {id(parameter) for layer in self.layers for parameter in layer.parameters}
        others = [parameter for parameter in model.parameters() if id(parameter) not in experts]
        for name, parameter in model.named_parameters():
            self._names[parameter] = name
        num_found = len(list(model.parameters())) - len(others)
        if 0 < num_found < len(experts) or (not num_found and any(not layer.joins_in_backward for layer in self.homes)):
            raise InputError(
                f"the model has {num_found} of the session's {len(experts)} expert tensors; if they were replaced, as "
                "by load_state_dict(assign=True), add layers with a function that returns them"
            )
        replicated = [parameter for parameter in others if not hasattr(parameter, "to_local")]
        self._has_dtensors = len(replicated) < len(others)
        return replicated

    @property
    def transfers(self) -> Transfers:
        """Replica transfers; created on first use, when all layers have been added."""
        return self._experts.transfers
