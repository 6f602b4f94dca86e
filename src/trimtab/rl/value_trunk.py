"""`ValueTrunk`: a value model with layers and experts of its own, which follow its router."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from trimtab.integrations.transformers import distribute_experts
from trimtab.rl.batches import MicroBatch
from trimtab.rl.value_model import MAX_NORM
from trimtab.runtime import Session

LEARNING_RATE = 1e-4


class ValueTrunk:
    """A decoder like the policy's, with a linear head. A `ValueModel`.

    No rollout records its routing, so its session is in mode `live`. It begins with the policy's weights; the first
    values are 0. Its experts are spread over all ranks.

    Args:
        model_config: of the policy.
        session: for its experts alone, in mode `live`.
        device: of the parameters.
        gradient_checkpointing: recompute activations in backward.

    Attributes:
        network: `trunk` and `head`.
        optimizer: of both.
        replicated: its parameters outside experts.
    """

    def __init__(
        self, model_config: Any, session: Session, device: torch.device, *, gradient_checkpointing: bool
    ) -> None:
        trunk = AutoModel.from_config(model_config, dtype=torch.float32).to(device)
        distribute_experts(trunk, session)
        if gradient_checkpointing:
            trunk.gradient_checkpointing_enable({"use_reentrant": False})
        head = nn.Linear(model_config.hidden_size, 1).to(device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.network = nn.ModuleDict({"trunk": trunk, "head": head}).train()
        self.session = session
        self.replicated = session.replicated_parameters(self.network)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def start_from(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the policy's decoder."""
        prefix = f"{self.network['trunk'].base_model_prefix}."
        trunk = {f"trunk.{name.removeprefix(prefix)}": policy[name] for name in policy if name.startswith(prefix)}
        head = {f"head.{name}": value for name, value in self.network["head"].state_dict().items()}
        self.session.logical.load_weights(self.network, trunk | head)

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` of the state after each fed token, from the tokens alone.

        Sequences without a wanted value are not fed; their values are 0. A rank that has no other feeds one token of
        padding, so that it runs every layer.
        """
        width, positions = batch.input_ids.shape[1], batch.positions
        sequence_n, column_n = positions // width, positions % width
        is_fed = wanted.any(dim=1)
        fed_n = is_fed[sequence_n]
        sequences, fed_width = is_fed.nonzero()[:, 0], 1
        if len(sequences):
            fed_width = int(column_n[fed_n].max()) + 1
        else:
            sequences = sequences.new_zeros(1)
        place = is_fed.cumsum(0) - 1
        inputs = batch.input_ids[sequences, :fed_width]
        with self.session.live_micro_step(positions=(place[sequence_n] * fed_width + column_n)[fed_n]):
            own = self.network["trunk"](input_ids=inputs, use_cache=False).last_hidden_state
        found = self.network["head"](own).squeeze(-1) * is_fed[sequences, None]
        values = found.new_zeros(wanted.shape)
        return values.index_put((sequences[:, None], torch.arange(fed_width, device=found.device)), found)

    def finish_gradients(self) -> None:
        """Complete the gradients over all ranks."""
        self.session.finish_gradients(self.replicated)

    def step(self) -> None:
        """Clip the gradients by their norm, run an optimizer step, and zero them."""
        self.session.clip_gradients(self.replicated, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        """Replicas, and loads of ranks without and with them, in recompute and update."""
        found = self.session.take_metrics()
        names = ("replicas", "max_vio_before", "max_vio_after")
        return {f"value/{name}": found[f"live/{name}"] for name in names}

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state in logical expert order, as `key/parameter`."""
        logical = self.session.logical
        weights = (("parameter", name, value) for name, value in logical.weights(self.network))
        optimizer = (
            (key, name, torch.as_tensor(value))
            for name, values in logical.optimizer_state(self.network, self.optimizer)
            for key, value in values.items()
        )
        return {f"{key}/{name}": value for key, name, value in chain(weights, optimizer)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned, of a run with any number of ranks."""
        weights: dict[str, torch.Tensor] = {}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for path, value in state.items():
            key, name = path.split("/", 1)
            if key == "parameter":
                weights[name] = value
            elif f"parameter/{name}" in state:
                optimizer.setdefault(name, {})[key] = value
        self.session.logical.load_weights(self.network, weights)
        self.session.logical.load_optimizer_state(self.network, self.optimizer, optimizer)

    def close(self) -> None:
        """Release threads and shared memory of its session."""
        self.session.close()
