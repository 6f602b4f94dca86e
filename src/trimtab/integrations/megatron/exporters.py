"""Exporters of frameworks while experts are away from their first ranks: their names become logical, or they raise.

Most exporters read names and Parameters of a model by `named_parameters()` in every export. A MoE layer refuses that,
see `check_reader`, where no `WeightExport` runs that puts the names right. Others are in `EXPORTERS`, and wrapped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce, wraps
from typing import Any
from weakref import WeakSet

from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.megatron.logical_order import ADVICE, NamedTensor, WeightExport

_BRIDGE = "megatron.bridge.models.conversion"
EXPORTERS = {
    f"{_BRIDGE}.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf": True,
    f"{_BRIDGE}.quant_bridge:MegatronQuantizationBridge.stream_weights_megatron_to_hf_quant": True,
    # ms-swift's; it reaches Parameters through modules.
    "mcore_bridge.bridge.gpt_bridge:GPTBridge.export_weights": True,
    "mcore_bridge.bridge.gpt_bridge:GPTBridge.load_weights": False,
    # These keep Parameters by name.
    "megatron.core.resharding.refit:execute_reshard_plan": False,
    "verl.workers.engine.megatron.transformer_impl:MegatronEngine.get_per_tensor_param_shard": False,
    "nemo_rl.models.policy.workers.megatron_policy_worker:MegatronPolicyWorkerImpl.nccl_reshard_refit": False,
}
"""Functions of frameworks that export or load weights by the position of experts, and do not read names each time; and
whether they yield (name, tensor) pairs of the models in their first argument, which get logical names. Others raise."""
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_PARALLEL = f"{_STRATEGIES}.fully_parallel"
CACHES = {
    f"{_PARALLEL}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization": "cached_distribution",
    f"{_PARALLEL}:FullyParallelLoadStrategyWrapper.apply_loading_parallelization": "cached_distribution",
    f"{_STRATEGIES}.torch:TorchDistSaveShardedStrategy.async_save": "use_cached_ckpt_structure",
}
"""Methods of Megatron's checkpoints, and what they keep of earlier ones with `ckpt_assume_constant_structure`: which
rank has which shard. It is wrong after moves, so it is dropped, on all ranks alike."""
READERS = {
    "megatron.core.distributed.finalize_model_grads", "megatron.core.utils:check_param_hashes_across_dp_replicas",
    "slime.backends.megatron_utils.megatron_patch.megatron_chunked_grad_coalesce_patch",
}  # fmt: skip
"""Modules, and functions of others, that read names and Parameters in a training loop, and give neither away."""

_followed: WeakSet[WeightExport] = WeakSet()
_replaced: list[tuple[Any, str, Any]] = []


def follow(export: WeightExport) -> None:
    """Wrap those of `EXPORTERS` and `CACHES` that have been imported, for the model of an export. Call it before each
    move: a module that is imported after the last one has read no names yet."""
    _followed.add(export)
    for place, renames in EXPORTERS.items():
        _replace(place, _renaming if renames else partial(_refusing, place.partition(":")[2]))
    for place, kept in CACHES.items():
        _replace(place, partial(_forgetting, kept))


def _replace(place: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner = reduce(lambda found, each: getattr(found, each, None), classes, sys.modules.get(module))
    plain = getattr(owner, name, None)
    if plain is not None and not any((owner, name) == replaced[:2] for replaced in _replaced):
        _replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, make(plain))


def unfollow(export: WeightExport) -> None:
    """Undo `follow`."""
    _followed.discard(export)
    while _replaced and not _followed:
        owner, name, plain = _replaced.pop()
        if plain is None:
            delattr(owner, name)
        else:
            setattr(owner, name, plain)


def check_reader(where: str) -> None:
    """Raise InputError if `named_parameters()` of a module is being read, by any function but `READERS`.

    Call it in a function that stands for the `named_modules` of a module, through which torch reads its Parameters;
    `parameters()` and `modules()` give no names away.

    Args:
        where: what the names are of.
    """
    frame, is_named = sys._getframe(2), False
    while frame.f_globals.get("__name__") == nn.Module.__module__ and frame.f_back is not None:
        if frame.f_code.co_name in ("parameters", "modules"):
            return
        is_named |= frame.f_code.co_name == "named_parameters"
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    reader = f"{module}:{frame.f_code.co_name}"
    if is_named and not READERS & {module, reader}:
        raise InputError(
            f"{reader} reads named_parameters(), in which {where} has experts by position, and they have moved; let it "
            f"run within logical_names() or weight_sync() of the MegatronSession, or {ADVICE}"
        )


def _renaming(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @wraps(plain)
    def stream(*args: Any, **kwargs: Any) -> Iterator[NamedTensor]:
        models = list(signature.bind(*args, **kwargs).arguments.values())[1]
        pairs, export = plain(*args, **kwargs), _export_of(models)
        # Within logical_names() the names are put right there.
        yield from pairs if export is None or export.is_running else export.begin()(pairs)

    return stream


def _refusing(path: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(export.have_moved for export in _followed):
            raise InputError(f"{path} has experts by position, and they have moved; {ADVICE}")
        return plain(*args, **kwargs)

    return call


def _forgetting(kept: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(strategy, kept, None)
        return plain(strategy, *args, **kwargs)

    return call


def _export_of(models: Any) -> WeightExport | None:
    """The export of the model that these chunks are of, wrapped or not, or parts of them."""
    modules = _modules(models if isinstance(models, list | tuple) else [models])
    return next((export for export in _followed if modules & _modules(export.chunks)), None)


def _modules(chunks: Any) -> set[nn.Module]:
    return {module for chunk in chunks for module in chunk.modules()}
