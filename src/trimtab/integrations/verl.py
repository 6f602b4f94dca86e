"""verl's Megatron engine with balanced experts, by a flag: `actor_rollout_ref.model.external_lib`: docs/frameworks.md.

verl imports this module in every worker before it makes an engine. The module registers its engine under the vendor
"trimtab" of verl's `EngineRegistry`, and asks for that vendor. Options are in `override_mcore_model_config.trimtab` of
the actor's Megatron config, of which verl itself reads `moe_config` alone. Critics and engines of FSDP stay verl's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.framework_names import check_names
from trimtab.integrations.framework_options import TABLES, refused
from trimtab.integrations.megatron import MegatronSession
from trimtab.integrations.options import PluginOptions
from trimtab.integrations.plugin_report import first_line, print_on_first_rank, step_figures
from trimtab.integrations.schedule import MicroBatchRoutes, ScheduleAdapter
from trimtab.launch.launcher import LAUNCH_ORDER
from trimtab.rank_variables import is_switched_off

FITS = "verl 0.9.0 and 0.9.1"
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_REPLAY = "verl.utils.megatron.router_replay_utils"
NAMES = (
    "verl.workers.engine:EngineRegistry.register(model_type, backend, device, vendor)",
    "verl.workers.engine.megatron.transformer_impl:get_forward_backward_func",
    f"{_ENGINE}.__init__(model_config, engine_config, optimizer_config, checkpoint_config)",
    f"{_ENGINE}._build_optimizer()",
    f"{_ENGINE}.forward_backward_batch(data, loss_function, forward_only)",
    f"{_ENGINE}.is_mp_src_rank_with_outputs()",
    f"{_REPLAY}:align_r3_router_replay_data(layers_topk_idx, input_ids)",
    f"{_REPLAY}:build_r3_replay_mask(input_ids, response_mask)",
    f"{_REPLAY}:iter_model_routers(model)",
    f"{_REPLAY}:set_router_replay_data(layers_topk_idx, attention_mask, tf_config, vp_rank, replay_mask, model)",
    "verl.utils.megatron.router_replay_patch:RouterReplay.set_target_indices(topk_indices, replay_mask)",
    "verl.utils.megatron.router_replay_patch:RouterReplay.target_topk_idx",
    "verl.utils.megatron.router_replay_patch:RouterReplay.target_replay_mask",
    "verl.utils.megatron.router_replay_patch:RouterReplay.clear_indices()",
    "verl.utils.megatron.router_replay_patch:RouterReplay.router_replay_action",
    "verl.utils.megatron.router_replay_patch:RouterReplayAction.REPLAY_FORWARD",
    "verl.utils.megatron_utils:unwrap_model(model)",
    "verl.utils.device:get_device_name()",
)
"""What this module replaces and calls of verl, with the parameters that it gives; see `check_names`."""
VENDOR, VENDOR_VARIABLE = "trimtab", "VERL_ENGINE_VENDOR"
OPTIONS = "override_mcore_model_config.trimtab"


def choose_engine() -> None:
    """Let verl's registry choose the engine of this module. Raises InputError if another vendor is asked for."""
    vendor = os.environ.setdefault(VENDOR_VARIABLE, VENDOR)
    if vendor != VENDOR:
        raise InputError(
            f"{VENDOR_VARIABLE} is {vendor!r}, which chooses another engine; unset it, or leave out "
            "external_lib=trimtab.integrations.verl"
        )


def read_options(engine_config: Any) -> PluginOptions:
    """The options of the actor's Megatron config. Raises InputError."""
    values = dict(engine_config.override_mcore_model_config.get("trimtab", None) or {})
    if "moves" in values or values.get("mode") == "rehome":
        text = "experts keep their ranks in a run of verl; renumber the checkpoint instead (trimtab renumber)"
        raise InputError(f"{OPTIONS} has moves or mode=rehome: {text}")
    options = PluginOptions.from_mapping(values, source=OPTIONS)
    return PluginOptions(mode="off") if is_switched_off() else options


def check_supported(model_config: Any, engine_config: Any, options: PluginOptions) -> None:
    """Raise InputError, naming the first option of a training engine that is not supported."""
    if options.mode == "off":
        return
    if engine_config.router_replay.mode == "disabled" and options.mode != "live":
        raise InputError(
            f"verl can't be balanced: mode={options.mode} needs recorded routing; set router_replay.mode=R3, or use "
            "mode=live"
        )
    given = {
        "qat.enable": engine_config.qat.enable,
        "lora.rank": model_config.lora.get("rank", 0),
        "mtp.enable": model_config.mtp.enable,
    }
    given |= {option.name: getattr(engine_config, option.name) for option in TABLES["verl"] if option.name not in given}
    for problem in refused(TABLES["verl"], given, options.mode):
        raise InputError(f"verl can't be balanced: {problem}")


check_names(NAMES, fits=FITS)
choose_engine()
# Read by NCCL when it makes a communicator, which verl does later.
for _name, _value in LAUNCH_ORDER.items():
    os.environ.setdefault(_name, _value)
_replay: Any = import_module(_REPLAY)
_Action: Any = import_module("verl.utils.megatron.router_replay_patch").RouterReplayAction
_impl: Any = import_module("verl.workers.engine.megatron.transformer_impl")
_engines: Any = import_module("verl.workers.engine")
_unwrap: Any = import_module("verl.utils.megatron_utils").unwrap_model
# On an NPU verl has an engine that patches Megatron for it.
_is_npu: bool = import_module("verl.utils.device").get_device_name() == "npu"
_VerlEngine: Any = _engines.MindspeedEngineWithLMHead if _is_npu else _impl.MegatronEngineWithLMHead


@_engines.EngineRegistry.register(
    model_type="language_model", backend="megatron", device=["cuda", "npu"], vendor=VENDOR
)
class TrimtabMegatronEngine(_VerlEngine):
    """verl's engine, whose passes with recorded routing are planned.

    Other passes run as verl's: those of reference engines, the pass of R2 that records, and all of mode `off`.

    Attributes:
        adapter: plans the passes; None if this engine runs as verl's.
    """

    adapter: ScheduleAdapter | None = None

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self._options = PluginOptions(mode="off")
        # An engine that only runs forwards is a reference model.
        if not engine_config.forward_only:
            self._options = read_options(engine_config)
            check_supported(model_config, engine_config, self._options)
        super().__init__(
            model_config=model_config, engine_config=engine_config, optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )  # fmt: skip

    @property
    def session(self) -> MegatronSession | None:
        """The session of this engine's model; None if it runs as verl's."""
        return None if self.adapter is None else self.adapter.session_of(self.module)

    def _build_optimizer(self) -> Any:
        """verl calls it when the model is loaded and on the device, and not in reference engines."""
        optimizer = super()._build_optimizer()
        print_on_first_rank(first_line("verl", self._options, self.tf_config))
        if self._options.mode == "off":
            return optimizer
        if self.adapter is None:
            self.adapter = ScheduleAdapter(_impl, self._routes)
            self.adapter.install()
        self.adapter.balance(self.module, self._options)
        return optimizer

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """As verl's. The metrics of a balanced pass have its figures, as `actor/moe/*`."""
        session = self.session
        before = None if session is None else session.report
        outputs = super().forward_backward_batch(data, loss_function, forward_only)
        if session is not None and (session.report is not before or self._options.mode == "live"):
            figures = step_figures(session)
            if self.is_mp_src_rank_with_outputs():
                # verl joins the lists of all data ranks.
                outputs["metrics"].update(
                    {f"actor/moe/{name.rpartition('/')[2]}": [value] for name, value in figures.items()}
                )
        return outputs

    def _routes(self, micro_batch: Any, chunks: Sequence[nn.Module]) -> MicroBatchRoutes | None:
        """Routes of a micro-batch where verl replays them; see `ScheduleAdapter`."""
        session = self.session
        if session is None or list(chunks) != list(self.module):
            return None
        if self._options.mode == "live":
            return MicroBatchRoutes(())
        routes = micro_batch.get("routed_experts", None)
        if routes is None or not self._replays():
            return None
        tokens = micro_batch["input_ids"]
        if self.engine_config.router_replay.mode == "R3":
            routes = _replay.align_r3_router_replay_data(layers_topk_idx=routes, input_ids=tokens)
        # Nobody reads the last row of a sequence, and sequences without a trained response.
        is_read = _replay.build_r3_replay_mask(input_ids=tokens, response_mask=micro_batch["response_mask"])
        ids_NLK, is_read_N = self._of_this_rank(routes, is_read, micro_batch.get("attention_mask", None))
        if is_read_N is None:
            return MicroBatchRoutes(ids_NLK.numpy())
        ids_NLK[~is_read_N] = -1
        uses_all_routes = session.session is not None and session.session.auxiliary_loss()
        return MicroBatchRoutes(ids_NLK.numpy(), None if uses_all_routes else (~is_read_N).numpy())

    def _replays(self) -> bool:
        """Whether verl is about to replay routes, and not to record them or to let routers choose."""
        routers = (router for chunk in self.module for _, router in _replay.iter_model_routers(_unwrap(chunk)))
        return any(router.router_replay_action == _Action.REPLAY_FORWARD for router in routers)

    def _of_this_rank(self, routes: Any, is_read: Any, attention_mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids `[n, L, K]` of this rank's n tokens and L layers; `[n]` bool, False for padding and rows not read.

        verl's own code cuts them and gives them to the routers. They are read there, and taken away again.
        """
        layers: list[torch.Tensor] = []
        is_read_N = None
        for chunk in self.module:
            model = _unwrap(chunk)
            routers = [router for _, router in _replay.iter_model_routers(model)]
            if not routers:
                continue
            _replay.set_router_replay_data(
                layers_topk_idx=routes, attention_mask=attention_mask, tf_config=self.tf_config,
                vp_rank=getattr(model, "vp_stage", 0), replay_mask=is_read, model=model,
            )  # fmt: skip
            for router in routers:
                layers.append(router.target_topk_idx)
                is_read_N = router.target_replay_mask
                router.clear_indices()
        return torch.stack(layers, dim=1).cpu(), None if is_read_N is None else is_read_N.bool().view(-1).cpu()
