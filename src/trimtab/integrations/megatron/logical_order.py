"""What leaves a training run has experts in logical order: exported names, checkpoints. The rest is refused by name.

Megatron and the exporters of its models number the experts of a layer by *position*: rank i of the expert-parallel
group holds the positions i * E / R up to (i + 1) * E / R. Where experts have moved, position and expert differ.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.runtime.state.expert_places import ExpertPlaces

NamedTensor = tuple[str, torch.Tensor]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Experts as modules, and as numbered weights of a grouped product; then all experts of a layer in one tensor.
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
_OF_EXPERTS = ".experts."
# Layers for multi-token prediction have numbers of their own, and their experts stay at home.
_MTP = re.compile(r"(?:^|\.)mtp\.")
ADVICE = "call return_home() of the MegatronSession first, on all ranks"
# Formats of Megatron's distributed optimizer that store elements by their place in its buffers.
POSITIONAL = ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter")


def format_of(metadata: Mapping[str, Any] | None) -> str | None:
    """The distributed optimizer's format in the `metadata` that Megatron gives to model and optimizer."""
    return (metadata or {}).get("distrib_optim_sharding_type")


def rename_experts(pairs: Iterable[NamedTensor], places_of_layer: Mapping[int, ExpertPlaces]) -> Iterator[NamedTensor]:
    """Yields exported tensors with the logical numbers of experts in their names.

    Args:
        pairs: names as Megatron's or Hugging Face's, with the number of the decoder layer in the whole model, and for
            an expert its position in all ranks; and tensors. One tensor of all experts `[E, ...]` is put in order.
        places_of_layer: by decoder layer the places of experts, of all MoE layers.

    Raises:
        InputError: if a name has no number from 0 to E - 1 of an expert, and the tensor is not one of all experts; or
            if it has the number of a layer without experts, since the exporter then numbers layers in another way.
    """
    last = max(places_of_layer, default=-1)
    for pair in pairs:
        name, tensor = pair
        layer = _LAYER.search(name) if _OF_EXPERTS in name and not _MTP.search(name) else None
        number = int(layer[1]) if layer else last + 1
        if number > last:
            yield pair
            continue
        places = places_of_layer.get(number)
        if places is None:
            raise InputError(f"{name} has experts, and layer {number} of the Megatron model has none; {ADVICE}")
        position, num_experts = _EXPERT.search(name), len(places.home_E)
        if position and int(position[0]) < num_experts:
            name = f"{name[: position.start()]}{places.by_position[int(position[0])]}{name[position.end() :]}"
        elif not position and tensor is not None and tensor.ndim and len(tensor) == num_experts:
            tensor = tensor.index_select(0, torch.from_numpy(places.positions_E).to(tensor.device))
        # Some exporters have tensors on one rank alone.
        elif position or tensor is not None:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}; the name should have the number of an expert below "
                f"{num_experts}, or the tensor should be of all {num_experts} experts"
            )
        # Those of Megatron-Bridge are named tuples.
        make: Callable[[Any], NamedTensor] = getattr(pair, "_make", tuple)
        yield make((name, tensor))


class LayerOfExperts(Protocol):
    """A MoE layer whose experts may have moved.

    Attributes:
        decoder_layer: its number among all layers of the model, from 0.
        places: the places of its experts. Another value after a move.
    """

    decoder_layer: int

    @property
    def places(self) -> ExpertPlaces: ...


class WeightExport:
    """Exports of weights, with the logical numbers of experts.

    Args:
        layers: of this rank.

    Attributes:
        chunks: the model's.
        is_running: whether an exporter runs now whose names are made logical.
    """

    def __init__(self, layers: Sequence[LayerOfExperts], chunks: Sequence[nn.Module]) -> None:
        self._layers, self.chunks = layers, chunks
        self.is_running = False

    @property
    def have_moved(self) -> bool:
        """Whether experts of this rank's layers are elsewhere than Megatron has them."""
        return not all(layer.places.are_first for layer in self._layers)

    @contextmanager
    def sync(self) -> Iterator[Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]]:
        """A context in which exporters may read names; gives what `begin` returns. Collective as that."""
        rename = self.begin()
        with self._running():
            yield rename

    def begin(self) -> Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]:
        """Gather the places of experts of all pipeline stages. Collective over the ranks of the pipeline.

        Returns:
            `rename_experts` of this export, which is not a collective. It raises RuntimeError if experts move.
        """
        mine = self._moved
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        stages = [{layer.decoder_layer: layer.places for layer in self._layers}]
        if pipeline.size() > 1:
            stages *= pipeline.size()
            dist.all_gather_object(stages, stages[0], group=pipeline)
        places_of_layer = {number: places for stage in stages for number, places in stage.items()}
        if all(places.are_first for places in places_of_layer.values()):
            places_of_layer = {}

        def renamed(pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
            for pair in rename_experts(self._run(pairs), places_of_layer):
                if self._moved != mine:
                    raise RuntimeError("experts have moved since this weight sync began; begin it again")
                yield pair

        return renamed

    def _run(self, pairs: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The pairs of an exporter, which may call `state_dict()` of the model, as verl's does for its names."""
        exporter = iter(pairs)
        while True:
            with self._running():
                pair = next(exporter, None)
            if pair is None:
                return
            yield pair

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    @property
    def _moved(self) -> dict[int, ExpertPlaces]:
        """The places of experts by decoder layer, where they have moved."""
        return {layer.decoder_layer: layer.places for layer in self._layers if not layer.places.are_first}


def logical_shards(shards: dict[str, Any], names_of_rows: Sequence[Sequence[str]], axis: int, shifts: Array) -> None:
    """Give the shards of experts in a `sharded_state_dict` their logical place, in `shards`.

    Optimizers' shards of the same Parameters follow from these in all formats but `POSITIONAL`.

    Args:
        names_of_rows: for each row the keys of its expert.
        axis: the axis of experts in global tensors.
        shifts: `[H]`, for each row the expert minus its position.
    """
    for names, shift in zip(names_of_rows, shifts.tolist(), strict=True):
        for name in names:
            if shift and name in shards:
                shards[name] = _shifted(shards[name], axis, shift)


def _shifted(shard: Any, axis: int, shift: int) -> Any:
    if isinstance(shard, ShardedTensor):
        offset = list(shard.global_offset)
        offset[axis] += shift
        return replace(shard, global_offset=tuple(offset))
    if isinstance(shard, ShardedTensorFactory):
        build = shard.build_fn
        return replace(shard, build_fn=lambda *args: _shifted(build(*args), axis, shift))
    if isinstance(shard, list):
        return [_shifted(part, axis, shift) for part in shard]
    if isinstance(shard, dict):
        return {key: _shifted(part, axis, shift) for key, part in shard.items()}
    raise InputError(f"experts that have moved can't be saved in a {type(shard).__name__}; {ADVICE}")


class PositionalGuard:
    """Watches, while experts are away, what stores an optimizer's state by position.

    Replaces methods of Megatron's optimizer until `remove`. `state_dict()` and others raise InputError: Megatron calls
    them on some ranks only.

    Args:
        have_moved: whether experts are away.
        before_positional: called before `sharded_state_dict` stores by position, with what does; see `BalancedLayer`.
    """

    def __init__(
        self, optimizer: Any, have_moved: Callable[[], bool], before_positional: Callable[[str], None]
    ) -> None:
        self._optimizer, self._have_moved, self._before_positional = optimizer, have_moved, before_positional
        self._names = [
            name
            for name in ("sharded_state_dict", "state_dict", "load_state_dict", "save_parameter_state",
                         "load_parameter_state")
            if hasattr(optimizer, name)
        ]  # fmt: skip
        self._is_sharded = False
        for name in self._names:
            plain = getattr(optimizer, name)
            setattr(
                optimizer, name, self._sharded(plain) if name == "sharded_state_dict" else self._refused(name, plain)
            )

    def remove(self) -> None:
        """Give the optimizer its methods back."""
        for name in self._names:
            vars(self._optimizer).pop(name, None)

    def _sharded(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        # Megatron's optimizers have different arguments at the same place.
        signature = inspect.signature(plain)

        def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
            arguments = kwargs | signature.bind(*args, **kwargs).arguments
            kind = arguments.get("sharding_type") or format_of(arguments.get("metadata"))
            if kind in POSITIONAL and self._have_moved():
                if arguments.get("model_sharded_state_dict"):
                    # Those of the model have been made, of experts that are away.
                    raise InputError(
                        f"the optimizer's format {kind} stores experts by position, and they have moved; give the same "
                        f"metadata to the model's sharded_state_dict() before, or {ADVICE}"
                    )
                self._before_positional(f"the optimizer's format {kind} stores")
            self._is_sharded = True
            try:
                return plain(*args, **kwargs)
            finally:
                self._is_sharded = False

        return sharded_state_dict

    def _refused(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_sharded and self._have_moved():
                raise InputError(f"the optimizer's {name}() has experts by position, and they have moved; {ADVICE}")
            return plain(*args, **kwargs)

        return call
