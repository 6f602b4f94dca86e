"""ROLL: balanced by a flag, `actor_train.worker_cls: trimtab.integrations.roll.ActorWorker`; see docs/frameworks.md.

`ActorWorker` is for the RLVR pipeline, `AgenticActorWorker` and `DPOActorWorker` for those of these names. Each is made
when it is first read, since ROLL's pipelines import packages of their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.dry_replay import UNREAD, DryReplayPlugin
from trimtab.integrations.framework_options import TABLES
from trimtab.integrations.schedule import innermost
from trimtab.integrations.schedule_plugin import with_result

WORKERS = {
    "ActorWorker": "roll.pipeline.rlvr.actor_worker",
    "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker",
    "DPOActorWorker": "roll.pipeline.dpo.actor_worker",
}
"""Classes of this module, and the modules of the `ActorWorker` that they extend."""
_REPLAY = "roll.third_party.megatron.router_replay_utils"
_STRATEGY = "roll.distributed.strategy.megatron_strategy"


class RollPlugin(DryReplayPlugin):
    """ROLL at 8eb27cc2: routes `[B, T, L, K]` of padded sequences are in the batch, as `routed_experts`.

    Args:
        worker_config: the worker's config.
    """

    package = "roll"
    fits = "ROLL 8eb27cc2"
    refused = TABLES["roll"]
    refused_replay = TABLES["roll_replay"]
    names = (
        "roll.distributed.scheduler.decorator:register(dispatch_mode)",
        "roll.distributed.scheduler.decorator:Dispatch.ONE_TO_ALL",
        f"{_STRATEGY}:MegatronInferStrategy.forward_backward_func",
        f"{_STRATEGY}:MegatronTrainStrategy.train_step(batch, loss_func)",
        f"{_REPLAY}:set_router_replay_data(layers_topk_idx, attention_mask, tf_config, vp_rank)",
    )

    def __init__(self, worker_config: Any) -> None:
        super().__init__()
        self._worker_config = worker_config

    def check(self) -> None:
        """Check options and names before the model is built. Raises InputError."""
        if self.options.mode == "off":
            return
        config = self._worker_config
        if config.strategy_args.strategy_name != "megatron_train":
            raise InputError(
                f"roll can't be balanced: strategy_name is {config.strategy_args.strategy_name}, which has no expert "
                "parallelism of Megatron; use megatron_train, or mode=off"
            )
        self.check_names()
        given = vars(config) | config.strategy_args.strategy_config | {"lora_target": config.model_args.lora_target}
        self.refuse_options(given, replays=config.router_replay.mode != "disable")

    def install(self, strategy: Any) -> None:
        """Balance the passes of a strategy whose model is built. Raises InputError."""
        self.print_first_line(strategy.model.config)
        if self.options.mode == "off":
            return
        self.refuse_model(strategy.model.config)
        # Its experts are balanced in the first pass; now they may be on the host.
        self.plan_passes(strategy, "forward_backward_func", is_schedule=True)
        strategy.train_step = with_result(strategy.train_step, self._add_figures)

    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        tensors = micro_batch.batch
        is_token_BT = tensors["attention_mask"].bool()
        # Sequences are padded on the right. Nothing reads the last token of a sequence, nor padding behind it.
        is_read_BT = torch.zeros_like(is_token_BT)
        is_read_BT[:, :-1] = is_token_BT[:, 1:].flip(1).cumsum(1).flip(1) > 0
        routes_BTLK = tensors["routed_experts"].to(torch.int32)
        routes_BTLK = routes_BTLK.masked_fill(~is_read_BT[..., None, None], UNREAD)
        model = innermost(chunk)
        import_module(_REPLAY).set_router_replay_data(
            routes_BTLK, tensors["attention_mask"], model.config, getattr(model, "vp_stage", 0)
        )

    def _add_figures(self, metrics: dict[str, Any]) -> None:
        """Add figures to what ROLL logs of a train step."""
        name = self._worker_config.name
        metrics.update({f"{name}/{figure}": value for figure, value in self.figures().items()})


def __getattr__(name: str) -> Any:
    if name not in WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    worker = globals()[name] = _worker(name)
    return worker


def _worker(name: str) -> type:
    """ROLL's worker of a pipeline, whose passes with recorded routing are planned."""
    base: Any = import_module(WORKERS[name]).ActorWorker
    decorator: Any = import_module("roll.distributed.scheduler.decorator")

    # ROLL's cluster calls the methods of workers that are registered.
    @decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
    def initialize(self: Any, pipeline_config: Any) -> None:
        self.trimtab_plugin = plugin = RollPlugin(self.worker_config)
        plugin.check()
        base.initialize(self, pipeline_config)
        plugin.install(self.strategy)

    return type(name, (base,), {"initialize": initialize, "__module__": __name__, "__doc__": _worker.__doc__})
