"""ms-swift: balanced by a flag, `--external_plugins` with the file that this module prints; see docs/frameworks.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.integrations.dry_replay import UNREAD, DryReplayPlugin
from trimtab.integrations.framework_options import (
    TABLES,
    megatron_refusals,
    raise_first,
    refused,
)
from trimtab.integrations.schedule import innermost
from trimtab.integrations.schedule_plugin import with_result
from trimtab.launch.launcher import LAUNCH_ORDER

PLUGIN_FILE = Path(__file__).parent / "external_plugin" / "trimtab_ms_swift.py"
"""The file that ms-swift imports."""
_BASE = "swift.megatron.trainers.base"
_REPLAY = "swift.megatron.utils.router_replay_utils"
_UTILS = "swift.megatron.utils.utils"


def install() -> None:
    """Balance the Megatron trainer that this process makes; called when ms-swift imports `PLUGIN_FILE`.

    ms-swift does so when it reads its arguments, on all ranks, after it has imported its trainers and before it makes
    process groups. Other processes that read the arguments have no trainer.
    """
    base: Any = sys.modules.get(_BASE)
    if base is None:
        print("Trimtab in ms-swift: this process has no Megatron trainer, nothing is balanced", flush=True)
        return
    plugin = MsSwiftPlugin()
    if plugin.options.mode != "off":
        plugin.check_names()
    # Read by NCCL when it makes a communicator.
    for name, value in LAUNCH_ORDER.items():
        os.environ.setdefault(name, value)
    trainer = base.BaseMegatronTrainer
    trainer.__init__ = _with_plugin(trainer.__init__)


def _with_plugin(plain: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ms-swift's trainers, which builds and loads their model."""

    @wraps(plain)
    def init(self: Any, args: Any, *more: Any, **named: Any) -> None:
        self.trimtab_plugin = plugin = MsSwiftPlugin()
        plugin.check(args)
        plain(self, args, *more, **named)
        plugin.install(self)

    return init


class MsSwiftPlugin(DryReplayPlugin):
    """ms-swift 4.6: sequences are packed; routes `[1, T, L, K]` are in the micro-batch, as `routed_experts`.

    The pass of log-probabilities, which ms-swift runs without Megatron's schedule, has those of all tokens and layers.
    It cuts them, and puts those of this rank in the micro-batch for training.
    """

    package = "ms_swift"
    fits = "ms-swift 4.6.0 and 3602360a"
    refused = TABLES["ms_swift"]
    refused_replay = TABLES["ms_swift_replay"]
    names = (
        f"{_BASE}:get_forward_backward_func",
        f"{_BASE}:BaseMegatronTrainer.__init__(args)",
        f"{_BASE}:BaseMegatronTrainer.train_step()",
        "swift.megatron.trainers.rlhf_mixin:MegatronRLHFTrainer.compute_per_token_logps(model, data_iterator)",
        f"{_REPLAY}:get_local_topk_idx_for_current_rank(global_topk_idx, tf_config, packed_seq_params)",
        f"{_REPLAY}:set_router_replay_data(layers_topk_idx, tf_config)",
        f"{_UTILS}:get_packed_seq_params(args, position_ids)",
    )

    _args: Any

    def check(self, args: Any) -> None:
        """Check ms-swift's arguments. Raises InputError."""
        if self.options.mode == "off":
            return
        given, replays = vars(args), args.router_replay_mode != "disabled"
        self.refuse_options(given, replays=replays)
        problems = refused(TABLES["ms_swift_ray"], given, self.options.mode) if replays and given.get("use_ray") else []
        raise_first(self.package, [*problems, *megatron_refusals(self.options.mode, given)])

    def install(self, trainer: Any) -> None:
        """Balance the passes of a trainer whose model is built and loaded. Collective. Raises InputError."""
        if self.options.mode == "off":
            self.print_first_line(trainer.config)
            return
        self._args = trainer.args
        # ms-swift switches padding_free off when it builds some models.
        self.check(trainer.args)
        self.refuse_model(trainer.config)
        self.balance(import_module(_BASE), trainer.wrapped_models)
        trainer.train_step = with_result(trainer.train_step, lambda _: trainer._train_metrics.update(self.figures()))
        if hasattr(trainer, "compute_per_token_logps"):
            trainer.compute_per_token_logps = self._planned_log_probs(trainer, trainer.compute_per_token_logps)

    def set_targets(self, micro_batch: Any, chunk: nn.Module) -> None:
        model: Any = innermost(chunk)
        config, replay = model.config, import_module(_REPLAY)
        packed = import_module(_UTILS).get_packed_seq_params(self._args, _positions(micro_batch))

        def of_this_rank(values_BTLK: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = replay.get_local_topk_idx_for_current_rank(values_BTLK, config, packed)
            return found

        # As routes of all layers with one expert for each token, so that the same code cuts them.
        is_read_BT = read_tokens(micro_batch["labels"], _positions(micro_batch)).int()
        is_read = of_this_rank(is_read_BT[..., None, None].expand(-1, -1, config.num_layers, 1))
        routes = micro_batch["routed_experts"]
        # Only the batches of training have it: the pass of log-probabilities gives all that they have to the model.
        if "grpo_batch" not in micro_batch:
            routes = of_this_rank(routes)
        if routes.shape[1:3] != is_read.shape[1:3]:
            raise InputError(
                f"ms-swift gives the routers of this rank the routes of {list(routes.shape[1:3])} tokens and layers, "
                f"and they have {list(is_read.shape[1:3])}"
            )
        # uint8 where the trainer has recorded them.
        routes = routes.int()
        if self.marks_unread:
            routes = routes.masked_fill(is_read.to(routes.device) == 0, UNREAD)
        replay.set_router_replay_data(routes, config)

    def _planned_log_probs(self, trainer: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The pass of log-probabilities, of one micro-batch. That of a reference or teacher is not planned."""
        assert self.adapter is not None
        run, wrapped, unwrapped = self.adapter.schedule(_forward), trainer.wrapped_models, trainer.unwrapped_models

        def compute(model: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            if [model] != unwrapped:
                return plain(model, data_iterator, *args, **kwargs)
            return run(
                model=wrapped, data_iterator=data_iterator, num_microbatches=1, forward_only=True,
                forward_step_func=lambda iterator, _: plain(model, iterator, *args, **kwargs),
            )  # fmt: skip

        return compute


def _forward(*, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, **_: Any) -> Any:
    """A schedule of one micro-batch without a backward, as ms-swift computes log-probabilities."""
    return forward_step_func(data_iterator, model)


def read_tokens(labels_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
    """Which tokens of packed sequences a loss depends on, `[B, T]` bool: those at or before a token that predicts a
    label, in their sequence.

    Args:
        labels_BT: of tokens, -100 where there is none. The output for a token predicts the label of the token after it.
        positions_BT: of tokens in their sequences, from 0. Padding is in sequences of its own, or behind a sequence.
    """
    predicts = (labels_BT.roll(-1, -1) != -100).flatten()
    sequence = (positions_BT.flatten() == 0).cumsum(0)
    number = torch.arange(len(predicts), device=predicts.device)
    last = number.new_full((len(predicts) + 1,), -1)
    last.scatter_reduce_(0, sequence, number.masked_fill(~predicts, -1), "amax")
    return (number <= last[sequence]).view(labels_BT.shape)


def _positions(micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Positions `[1, T]` of tokens in their sequences."""
    text = micro_batch.get("text_position_ids")
    positions: torch.Tensor = micro_batch["position_ids"] if text is None else text
    return positions


if __name__ == "__main__":
    print(PLUGIN_FILE)
