"""`ValueHead`: a value model that predicts a response's reward from the policy's hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trimtab.rl.batches import MicroBatch
from trimtab.rl.value_model import MAX_NORM
from trimtab.runtime.gradients import sum_gradients

LEARNING_RATE = 1e-3


class ValueHead:
    """A small dense network on the policy's last hidden states, which get no gradient from it. A `ValueModel`.

    Policy and value model are thus updated independently. All ranks have the same parameters.

    Args:
        hidden_size: of the policy.
        seed: of the first weights. The first values are 0.
        device: of the parameters.
    """

    def __init__(self, hidden_size: int, seed: int, device: torch.device) -> None:
        inner, last = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, 1)
        # A generator of its own: ranks may have drawn different numbers from torch's.
        nn.init.xavier_uniform_(inner.weight, generator=torch.Generator().manual_seed(seed))
        for zero in (inner.bias, last.weight, last.bias):
            nn.init.zeros_(zero)
        self.network = nn.Sequential(inner, nn.SiLU(), last).to(device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def start_from(self, policy: Mapping[str, torch.Tensor]) -> None:
        """Nothing: it begins at 0."""

    def values(self, batch: MicroBatch, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Value `[B, T]` of the state after each fed token, from the hidden states alone."""
        found: torch.Tensor = self.network(hidden.detach().float()).squeeze(-1)
        return found

    def finish_gradients(self) -> None:
        """Sum the gradients over all ranks."""
        # There are none on any rank if the mini-batch has no micro-step.
        sum_gradients(self.network.parameters())

    def step(self) -> None:
        """Clip the gradients by their norm, run an optimizer step, and zero them."""
        nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state, as `key/parameter`, for checkpoints."""
        found = {f"parameter/{name}": value.detach() for name, value in self.network.named_parameters()}
        for name, parameter in self.network.named_parameters():
            found |= {f"{key}/{name}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return {name: value.cpu() for name, value in found.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned."""
        packed = self.optimizer.state_dict()
        for index, (name, parameter) in enumerate(self.network.named_parameters()):
            of_name = {key.removesuffix(f"/{name}"): value for key, value in state.items() if key.endswith(f"/{name}")}
            parameter.data.copy_(of_name.pop("parameter"))
            if of_name:
                packed["state"][index] = of_name
        self.optimizer.load_state_dict(packed)

    def close(self) -> None:
        """Nothing to release."""
