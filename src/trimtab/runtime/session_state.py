"""`SessionState`: the part of a `Session` that moves experts, with the state that optimizers and users keep of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from trimtab.errors import InputError
from trimtab.planner import Placement
from trimtab.runtime.ranks.lockstep import MOVE, digest
from trimtab.runtime.ranks.rank_calls import attempt
from trimtab.runtime.session_base import SessionBase
from trimtab.runtime.state.expert_places import ExpertPlaces
from trimtab.runtime.state.known_places import KeptState, Names, OnMove, names_in, read_state
from trimtab.runtime.state.named_rows import follow, names_of, saved_places
from trimtab.runtime.state.optimizer_rows import ExpertState, check_elementwise


class SessionState(SessionBase):
    """What moves with a session's experts, and moves of experts apart from plans."""

    def register_optimizers(self, *optimizers: torch.optim.Optimizer) -> None:
        """Register the optimizers that train the experts. Not a collective.

        Plans then move experts to other homes between steps, with their rows of optimizer state. Without it homes don't
        change. Register all that train experts, and again if you replace one: experts don't move while an optimizer
        that has state of them is not registered.

        Raises:
            InputError: if a layer was added with `weights`; if an optimizer updates an expert of a stack differently
                with other experts in it, as Adafactor does.
            RuntimeError: if an optimizer has state of experts from before they moved, as far as is known.
        """
        self._experts.need_own("move experts with their optimizer state")
        for optimizer in optimizers:
            check_elementwise(optimizer, self.homes)
        self._experts.optimizers.register(optimizers)

    def register_state(
        self, model: torch.nn.Module, state: torch.nn.Module | Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Let tensors that are kept of the experts move with them: averages of weights, anchors, old weights. Not a
        collective.

        They also move if another session moves the experts. Their rows are in the order of the parameters' rows now.
        They may be replaced by other tensors under the same names.

        Args:
            model: the model, for the names of the experts' parameters.
            state: tensors on the parameters' device, in any dtype, under the names that their parameters have in
                `model`; or a module with the same names, such as the `module` of an `AveragedModel`, whose state dicts
                then say which experts they have. It need not have all experts; other tensors don't matter.

        Returns:
            A function to call when the tensors are not used any more.

        Raises:
            InputError: if it has none of the experts, only some of a list, or a tensor of another shape.
        """
        names, present = names_of(model), read_state(state)
        entries: list[list[Names]] = [
            [names_in(tensor, names, present, f"MoE layer {layer.index}") for tensor in layer.tensors]
            for layer in self.homes
        ]
        if not any(entry for of_layer in entries for entry in of_layer):
            raise InputError(
                "register_state() was given no tensors under the names of the experts' parameters, such as "
                f"{next((names[id(p)][0] for layer in self.homes for p in layer.parameters if id(p) in names), '?')!r}"
            )
        ends = [
            layer.known.keep(KeptState(partial(read_state, state), names_T, [shape for shape, _ in layer.likes]))
            for layer, names_T in zip(self.homes, entries, strict=True)
        ]
        if isinstance(state, torch.nn.Module):
            for module in state.modules():
                follow(module)

        def end() -> None:
            for each in ends:
                each()

        return end

    def on_move(self, callback: OnMove) -> None:
        """Call a function after every move of experts, also in other sessions, once for each layer whose experts have
        moved, on all ranks in the same order. Not a collective.

        Args:
            callback: called with the layer's number, and the places of its experts before and after, an `ExpertPlaces`
                each: `experts_RH` `[R, H]` has the expert in each row of each rank. It may be a collective.
        """
        for layer in self.homes:
            layer.known.on_move.append(callback)

    def set_framework_state(self, state: ExpertState) -> None:
        """Let plans move the experts of framework layers. Not a collective.

        Args:
            state: what a framework's optimizers keep of the experts.
        """
        self._experts.state = state

    def move(self, placement: Placement) -> None:
        """Move all experts to given homes, with their rows of optimizer state, between steps. Plans include moves.

        Raises:
            InputError: if ranks have different numbers of experts, an optimizer has state that can't move or is not
                registered, registered state does not fit, or a layer was added with `weights`.
            RuntimeError: if gradients are not zero.
        """
        self._calls.require_between_micro_steps("move")
        self._move(*attempt(self._experts.places_after, placement))

    def move_to_saved(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Move all experts to the places that they had when the model's `state_dict()` was saved, between steps, so
        that `load_state_dict` can load it.

        Args:
            model: the model, with its names as in `state`.
            state: this rank's state dict. Layers of which it has no tensors don't move.

        Raises:
            InputError: if it was saved on another number of ranks; as `move`.
            RanksDisagreeError: if the ranks' state dicts were not saved at the same time.
        """
        self._calls.require_between_micro_steps("move_to_saved")
        self._move(*attempt(self._saved_places, model, state))

    def _saved_places(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> list[ExpertPlaces]:
        names = names_of(model)
        places = []
        for layer in self._experts.layers:
            known = [name for parameter in layer.parameters for name in names.get(id(parameter), ()) if name in state]
            places.append(saved_places(known[0], state, layer.known) if known else layer.places)
        return places

    def _move(self, places_L: Sequence[ExpertPlaces] | None, problem: Exception | None) -> None:
        """Move all experts to these places, unless there is a problem, which is raised on all ranks."""
        if places_L is not None:
            problem = attempt(self._experts.check_move, places_L)[1]
        same: dict[str, object] = {}
        if places_L is not None and problem is None:
            same = {"homes": digest(*(array for places in places_L for array in (places.home_E, places.rows_E)))}
            same |= self._experts.state_to_move(places_L)
        self._lockstep.agree(MOVE, must_match=same, problem=problem)
        assert places_L is not None
        self._experts.move(places_L)
