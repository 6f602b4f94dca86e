"""verl's Megatron engine with balanced experts, chosen by one flag: `actor_rollout_ref.model.external_lib`.

verl imports this module in every worker before it makes an engine. The module registers its engine under the vendor
"trimtab" of verl's `EngineRegistry`, and asks for that vendor. Options are in `override_mcore_model_config.trimtab` of the
actor's Megatron config, of which verl itself reads `moe_config` alone. Critics and engines of FSDP stay verl's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.megatron.balancing import MegatronSession
from trimtab.integrations.options import MODES, PluginOptions
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter

FITS = "verl 0.9.0 and 0.9.1 fit"
try:
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_name
    from verl.utils.megatron import router_replay_utils
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.megatron_utils import unwrap_model
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl

    # verl has an engine of its own for NPUs.
    if get_device_name() == "npu":
        from verl.workers.engine import MindspeedEngineWithLMHead as VerlEngine
    else:
        from verl.workers.engine.megatron import MegatronEngineWithLMHead as VerlEngine
except ImportError as error:
    raise InputError(f"trimtab.integrations.verl can't be used: {error}; {FITS}") from error

USED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (transformer_impl, "get_forward_backward_func", ()),
    (router_replay_utils, "align_r3_router_replay_data", ("layers_topk_idx", "input_ids")),
    (router_replay_utils, "build_r3_replay_mask", ("input_ids", "response_mask")),
    (router_replay_utils, "iter_model_routers", ("model",)),
    (
        router_replay_utils,
        "set_router_replay_data",
        ("layers_topk_idx", "attention_mask", "tf_config", "vp_rank", "replay_mask", "model"),
    ),
    (RouterReplay, "set_target_indices", ("topk_indices", "replay_mask")),
    (RouterReplay, "clear_indices", ()),
    (tensordict_utils, "get_non_tensor_data", ("data", "key", "default")),
    (EngineRegistry, "register", ("model_type", "backend", "device", "vendor")),
    (VerlEngine, "__init__", ("model_config", "engine_config", "optimizer_config", "checkpoint_config")),
    (VerlEngine, "_build_optimizer", ()),
    (VerlEngine, "forward_backward_batch", ("data", "loss_function", "forward_only")),
    (VerlEngine, "is_mp_src_rank_with_outputs", ()),
    (VerlEngine, "is_optimizer_offload_enabled", ()),
    (VerlEngine, "train_mode", ()),
    (VerlEngine, "get_per_tensor_param", ()),
    (VerlEngine, "get_per_tensor_param_shard", ()),
    (VerlEngine, "save_checkpoint", ()),
    (VerlEngine, "load_checkpoint", ()),
)
"""What this module uses of verl: the owner, the name, and the parameters that it gives."""
VENDOR, VENDOR_VARIABLE = "trimtab", "VERL_ENGINE_VENDOR"
OPTIONS = "override_mcore_model_config.trimtab"


def check_names() -> None:
    """Raise InputError, naming the first of `USED` that this version of verl does not have."""
    for owner, name, parameters in USED:
        place = f"{owner.__name__}.{name}"
        if not hasattr(owner, name):
            raise InputError(f"this version of verl has no {place}; {FITS}")
        used = getattr(owner, name)
        missing = [each for each in parameters if each not in inspect.signature(used).parameters]
        if missing:
            raise InputError(f"{place} of this version of verl has no parameter {missing[0]!r}; {FITS}")


def choose_engine() -> None:
    """Let verl's registry choose the engine of this module. Raises InputError if another vendor is asked for."""
    vendor = os.environ.setdefault(VENDOR_VARIABLE, VENDOR)
    if vendor != VENDOR:
        raise InputError(
            f"{VENDOR_VARIABLE} is {vendor!r}, which chooses another engine; unset it, or leave out "
            f"external_lib={__name__}"
        )


check_names()
choose_engine()


@EngineRegistry.register(model_type="language_model", backend="megatron", device=["cuda", "npu"], vendor=VENDOR)
class TrimtabMegatronEngine(VerlEngine):  # type: ignore[misc]
    """verl's engine, whose passes with recorded routing are planned.

    Passes without run as verl's: the reference engine, the pass of R2 that records, and all of mode `off`.

    Attributes:
        adapter: plans the passes; None in engines that run as verl's.
    """

    adapter: ScheduleAdapter | None = None

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self._options, self._moves = PluginOptions(mode="off"), False
        # The reference engine never trains, and is not balanced.
        if not engine_config.forward_only:
            self._options, self._moves = read_options(engine_config)
            check_supported(model_config, engine_config, self._options)
        super().__init__(
            model_config=model_config, engine_config=engine_config, optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )  # fmt: skip

    def _build_optimizer(self) -> Any:
        """verl calls it when the model is loaded and on the device, and not in reference engines."""
        optimizer = super()._build_optimizer()
        if self._options.mode == "off":
            return optimizer
        if self.adapter is None:
            self.adapter = ScheduleAdapter(transformer_impl, self._routes)
            self.adapter.install()
        session = self.adapter.balance(self.module, self._options)
        if self._moves:
            session.register_optimizer(optimizer, is_loaded=self._has_loaded_optimizer)
        return optimizer

    def _has_loaded_optimizer(self) -> bool:
        """Whether the optimizer's state is on the device; verl loads it for training passes only."""
        return self.mode == "train" or not self.is_optimizer_offload_enabled

    @property
    def session(self) -> MegatronSession | None:
        """The session of this engine's model; None if it runs as verl's."""
        return None if self.adapter is None else self.adapter.session_of(self.module)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """As verl's; a planned pass adds figures to the metrics, of verl's kind: a list of values by name."""
        session = self.session
        if session is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        before = session.report
        outputs = super().forward_backward_batch(data, loss_function, forward_only)
        is_planned = session.report is not before
        figures = session.take_metrics()
        if is_planned and session.report is not None:
            figures |= session.report.metrics()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({f"actor/{name}": [value] for name, value in figures.items()})
        return outputs

    def _routes(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        """The recorded routes of this rank's tokens and layers, sliced by verl's own code; None if it replays none."""
        session = self.session
        if session is None or list(chunks) != list(self.module):
            return None
        if self._options.mode == "live":
            return MicroBatchRoutes(())
        routes = micro_batch.get("routed_experts", None)
        replays = tensordict_utils.get_non_tensor_data(data=micro_batch, key="enable_routing_replay", default=False)
        if routes is None or not replays:
            return None
        tokens = micro_batch["input_ids"]
        if self.engine_config.router_replay.mode == "R3":
            routes = router_replay_utils.align_r3_router_replay_data(layers_topk_idx=routes, input_ids=tokens)
        # False for the last row of a sequence, and for sequences without a response.
        read = router_replay_utils.build_r3_replay_mask(input_ids=tokens, response_mask=micro_batch["response_mask"])
        ids_NLK, read_N = self._of_this_rank(routes, read, micro_batch.get("attention_mask", None), chunks)
        if read_N is None:
            return MicroBatchRoutes(ids_NLK.numpy())
        ids_NLK[~read_N] = -1
        has_loss_of_routes = session.session is not None and session.session.auxiliary_loss()
        return MicroBatchRoutes(ids_NLK.numpy(), None if has_loss_of_routes else (~read_N).numpy())

    def _of_this_rank(
        self, routes: Any, read: Any, attention_mask: Any, chunks: Sequence[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids `[n, L, K]` of this rank's n tokens and L layers, and `[n]` bool of rows that are read, padding apart.

        verl gives them to its routers; they are read there, and taken away again.
        """
        layers: list[torch.Tensor] = []
        mask = None
        for chunk in chunks:
            model = unwrap_model(chunk)
            routers = [router for _, router in router_replay_utils.iter_model_routers(model=model)]
            if not routers:
                continue
            router_replay_utils.set_router_replay_data(
                layers_topk_idx=routes, attention_mask=attention_mask, tf_config=self.tf_config,
                vp_rank=getattr(model, "vp_stage", 0), replay_mask=read, model=model,
            )  # fmt: skip
            for router in routers:
                layers.append(router.target_topk_idx)
                mask = router.target_replay_mask
                router.clear_indices()
        if not layers:
            return torch.zeros(0, 0, 1, dtype=torch.int64), None
        return torch.stack(layers, dim=1).cpu(), None if mask is None else mask.bool().view(-1).cpu()

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's, with the logical numbers of experts that have moved."""
        pairs, peft_config = super().get_per_tensor_param(*args, **kwargs)
        session = self.session
        return (pairs if session is None else session.logical_names(pairs)), peft_config

    def get_per_tensor_param_shard(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's. Raises InputError if experts may move, since it numbers them by position."""
        if self._moves:
            raise InputError(
                f"{OPTIONS}.moves with checkpoint_engine.backend=delta_sharded, which compares experts by their "
                "position; leave out moves, or use another backend"
            )
        return super().get_per_tensor_param_shard(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's, which stores experts by position: they return to their first ranks before."""
        self._return_home()
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's, which loads experts by position: they return to their first ranks before."""
        self._return_home()
        return super().load_checkpoint(*args, **kwargs)

    def _return_home(self) -> None:
        session = self.session
        if session is not None and session.have_moved:
            # With parameters and the optimizer's state on the device.
            with self.train_mode():
                session.return_home()


def read_options(engine_config: Any) -> tuple[PluginOptions, bool]:
    """The options of the actor's config, and whether experts may move. Raises InputError."""
    values = dict(engine_config.override_mcore_model_config.get("trimtab", None) or {})
    moves = values.pop("moves", False)
    if not isinstance(moves, bool):
        raise InputError(f"{OPTIONS} has moves={moves!r}; it should be true or false")
    options = PluginOptions.from_mapping(values, source=OPTIONS, modes=(*MODES, "rehome"))
    if moves and options.mode not in ("plan", "rehome"):
        raise InputError(f"{OPTIONS} has moves=true in mode={options.mode}; experts move in modes plan and rehome")
    return options, moves or options.mode == "rehome"


def check_supported(model_config: Any, engine_config: Any, options: PluginOptions) -> None:
    """Raise InputError, naming the first option of an engine that is not supported."""
    if options.mode == "off":
        return
    replay = engine_config.router_replay.mode
    refused = [
        (
            replay == "disabled" and options.mode != "live",
            f"router_replay.mode=disabled: mode {options.mode} plans by recorded routing; set router_replay.mode=R3, "
            "or mode=live",
        ),
        (
            engine_config.dynamic_context_parallel,
            "dynamic_context_parallel=True: its micro-batches are cut otherwise than the recorded ones; leave it out",
        ),
        (engine_config.use_fused_kernels, "use_fused_kernels=True: not tested; leave it out"),
        (engine_config.use_megatron_fsdp, "use_megatron_fsdp=True: no rank has whole experts; leave it out"),
        (engine_config.qat.enable, "qat.enable=True: replicas are not quantized; leave it out"),
        (model_config.lora.get("rank", 0) > 0, "lora.rank: replicas have no adapters; train whole weights"),
        (model_config.mtp.enable, "mtp.enable=True: routes of its layers are not recorded; leave it out"),
    ]
    for is_set, problem in refused:
        if is_set:
            raise InputError(f"trimtab.integrations.verl: {problem}")
