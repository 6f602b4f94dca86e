"""Run a model with recorded routing, without a session: on one rank, or under any data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.integrations.transformers.distributed_experts import in_session
from trimtab.integrations.transformers.families import (
    choose_experts,
    decoder_of,
    moe_blocks,
    num_experts,
    router_of,
    top_k,
)
from trimtab.trace import RoutingTrace


@dataclass(eq=False)
class _Replay:
    """Hooks of a batch's replay.

    Attributes:
        is_open: until the context ends.
    """

    is_open: bool = True

    def route(self, ids_NK: torch.Tensor, known_N: torch.Tensor, live_ids: torch.Tensor) -> torch.Tensor:
        """The recorded ids where they are known, of a router that would choose others."""
        if len(live_ids) != len(ids_NK):
            raise InputError(
                f"a router was given {len(live_ids)} tokens under replay_routing; attention_mask has {len(ids_NK)} "
                "places, and every forward should be fed the whole batch"
            )
        return torch.where(known_N[:, None], ids_NK.to(live_ids.dtype), live_ids)

    def checkpoint(self, checkpoint: Any, run: Any, *args: Any) -> Any:
        """Checkpoint a layer so that running it again after the context raises an error."""
        return checkpoint(partial(self._run, run), *args)

    def _run(self, run: Any, *args: Any) -> Any:
        if not self.is_open:
            raise RuntimeError(
                "gradient checkpointing runs a layer again after replay_routing() has ended; call backward() inside it"
            )
        return run(*args)


@contextmanager
def replay_routing(model: Any, trace: RoutingTrace, attention_mask: torch.Tensor) -> Iterator[None]:
    """Make every forward of a batch use the recorded experts, with the router's own weights for them.

    Gradients reach the router through these weights. Tokens of unknown route, padding, and last tokens follow the
    router's live choice. With gradient checkpointing, call `backward` inside the context, too. A model in a session
    replays in `session.micro_step` instead.

    Args:
        model: a supported model.
        trace: of the batch's sequences, in their order; see `RoutingTrace.select`.
        attention_mask: `[B, t]`, one where tokens of sequence b are fed: all tokens with a row in the trace, with or
            without the last token. Padding on either side.

    Raises:
        InputError: if trace, mask and model don't match, the model's type is not supported, or it is in a session;
            inside the context, if a forward is not of the whole batch.
    """
    blocks = moe_blocks(model)
    if any(in_session(block.experts) for block in blocks.values()):
        raise InputError(
            "the model is in a session, which replays routing itself; plan it and use session.micro_step()"
        )
    _check_model(model.config, trace, list(blocks))
    ids_LNK, known_LN = _lay_out(trace, attention_mask)
    replay = _Replay()
    with ExitStack() as stack:
        stack.callback(setattr, replay, "is_open", False)
        for layer, block in enumerate(blocks.values()):
            router = router_of(block)
            device = next(router.parameters()).device
            ids_NK, known_N = (torch.from_numpy(part[layer]).to(device) for part in (ids_LNK, known_LN))
            stack.callback(choose_experts(router, model.config, partial(replay.route, ids_NK, known_N)))
        for layer in decoder_of(model).layers:
            checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
            if checkpoint is not None:
                stack.callback(setattr, layer, "_gradient_checkpointing_func", checkpoint)
                layer._gradient_checkpointing_func = partial(replay.checkpoint, checkpoint)
        yield


def _check_model(config: Any, trace: RoutingTrace, layers: list[int]) -> None:
    shape = (trace.num_layers, trace.num_experts, trace.top_k)
    if shape != (len(layers), num_experts(config), top_k(config)):
        raise InputError(
            f"the trace has {trace.shape_text}; this {config.model_type} model has {len(layers)} MoE layers, "
            f"{num_experts(config)} experts, top-{top_k(config)}"
        )
    if trace.layer_indices.tolist() not in (layers, list(range(len(layers)))):
        raise InputError(
            f"the trace is of decoder layers {trace.layer_indices.tolist()}; this model's MoE layers are {layers}"
        )
    trace.check()


def _lay_out(trace: RoutingTrace, attention_mask: torch.Tensor) -> tuple[Array, Array]:
    """Ids `[L, B * t, K]`, uint8 or int32, and whether each is known, `[L, B * t]` bool."""
    mask_BT = attention_mask.cpu().numpy() != 0
    rows_B = trace.sequence_lengths
    if mask_BT.ndim != 2 or len(mask_BT) != len(rows_B):
        raise InputError(
            f"attention_mask has shape {mask_BT.shape}; for the trace's {len(rows_B)} sequences it should be "
            f"[{len(rows_B)}, tokens]"
        )
    fed_B = mask_BT.sum(axis=1)
    odd = (fed_B != rows_B) & (fed_B != rows_B + 1)
    if odd.any():
        row = int(odd.argmax())
        raise InputError(
            f"attention_mask has {fed_B[row]} ones in row {row}; sequence {row} of the trace has {rows_B[row]} routed "
            f"tokens, so it should have {rows_B[row]}, or {rows_B[row] + 1} with the last token"
        )
    routed_BT = mask_BT & (mask_BT.cumsum(axis=1) <= rows_B[:, None])
    ids = trace.expert_ids if trace.expert_ids.itemsize == 1 else trace.expert_ids.astype(np.int32)
    ids_LNK = np.full((trace.num_layers, mask_BT.size, trace.top_k), trace.no_route, ids.dtype)
    ids_LNK[:, routed_BT.reshape(-1)] = ids.transpose(1, 0, 2)
    return ids_LNK, (ids_LNK != trace.no_route).all(axis=2)
