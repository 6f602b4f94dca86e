"""`ValueTrunk`: a value model with layers and experts of its own, balanced from live routing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from trimtab.integrations.transformers import share_experts
from trimtab.rl.batches import MicroBatch
from trimtab.rl.step_metrics import live_metrics
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
        replicated: its parameters outside experts.
    """

    def __init__(
        self, model_config: Any, session: Session, device: torch.device, *, gradient_checkpointing: bool
    ) -> None:
        trunk = AutoModel.from_config(model_config, dtype=torch.float32).to(device)
        share_experts(trunk, session)
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
        session.register_optimizers(self.optimizer)

    def begin(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the policy's decoder."""
        prefix = f"{self.network['trunk'].base_model_prefix}."
        trunk = {f"trunk.{name.removeprefix(prefix)}": policy[name] for name in policy if name.startswith(prefix)}
        head = {f"head.{name}": value for name, value in self.network["head"].state_dict().items()}
        self.session.logical.load_weights(self.network, trunk | head)

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` of the state after each fed token, from the tokens alone; 0 in sequences without a wanted one.

        The others are not fed.
        """
        width = batch.input_ids.shape[1]
        sequences = wanted.any(dim=1).nonzero()[:, 0]
        if len(sequences) == 0:
            # Padding, so that this rank runs every layer.
            sequences, positions = sequences.new_zeros(1), batch.positions[:0]
        else:
            place = sequences.new_full((len(wanted),), -1)
            place[sequences] = torch.arange(len(sequences), device=sequences.device)
            places = place[batch.positions // width]
            positions = (places * width + batch.positions % width)[places >= 0]
        with self.session.live_micro_step(positions=positions):
            own = self.network["trunk"](input_ids=batch.input_ids[sequences], use_cache=False).last_hidden_state
        found = self.network["head"](own).squeeze(-1) * wanted[sequences].any(dim=1, keepdim=True)
        values: torch.Tensor = found.new_zeros(wanted.shape).index_put((sequences,), found)
        return values

    def finish_gradients(self) -> None:
        """Complete the gradients over all ranks."""
        self.session.finish_gradients(self.replicated)

    def step(self) -> None:
        """Clip the gradients by their norm, run an optimizer step, and zero them."""
        self.session.clip_gradients(self.replicated, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        """How its layers were balanced, in recompute and update."""
        found = live_metrics(self.session.take_metrics())
        return {name.replace("moe/", "value/"): value for name, value in found.items()}

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
