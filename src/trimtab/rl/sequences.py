"""`Sequence`: one response with prompt, routing and advantage. Exchange of sequences between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from trimtab.array_type import Array
from trimtab.rl.config import PrefixRouting
from trimtab.trace import RoutingTrace, hash_tokens
from trimtab.trace.routing import Windows


@dataclass(frozen=True, eq=False)
class Sequence:
    """A response. One that is generated over several steps may be incomplete, and partly trained.

    Attributes:
        token_ids: `[n]` int64, prompt and response.
        prompt_length: tokens of the prompt.
        expert_ids: `[n - 1, L, K]`, the routing that the rollout recorded. The last token was never fed.
        reward: of the response; 0 if it is incomplete.
        advantage: reward minus the mean of its group.
        log_probs: `[response_length]` float32, of the response's tokens when the rollout sampled them.
        is_finished: whether the response is complete.
        trained_tokens: tokens at the start of the response that the policy was trained on in earlier steps.
        row_versions: `[n - 1]` int32, the step with whose weights a token was fed and the token after it sampled. Rows
            with the same version are a window. None if all have the same.
        rebuilt_ids: `[n - 1, L, K]`, the routing when the last step fed all tokens again to rebuild its cache. Rows of
            the last window are equal to those in `expert_ids`. None if there is one window.
    """

    token_ids: Array
    prompt_length: int
    expert_ids: Array
    reward: float
    advantage: float
    log_probs: Array
    is_finished: bool = True
    trained_tokens: int = 0
    row_versions: Array | None = None
    rebuilt_ids: Array | None = None

    @property
    def num_fed(self) -> int:
        """Tokens that training feeds to the model: all but the last."""
        return len(self.token_ids) - 1

    @property
    def response_length(self) -> int:
        """Tokens of the response."""
        return len(self.token_ids) - self.prompt_length

    @property
    def new_tokens(self) -> int:
        """Tokens that the last step sampled."""
        if self.row_versions is None:
            return self.response_length
        versions = self.row_versions[self.prompt_length - 1 :]
        return int((versions == versions[-1]).sum())

    @property
    def windows(self) -> Windows:
        """Version that fed them first, and number, of the rows of every window; none if all have the same version."""
        if self.row_versions is None or self.row_versions[0] == self.row_versions[-1]:
            return ()
        versions, rows = np.unique(self.row_versions, return_counts=True)
        return tuple(zip(versions.tolist(), rows.tolist(), strict=True))

    def with_prefix_routing(self, routing: PrefixRouting, no_route: int) -> Sequence:
        """The sequence with the routing of earlier windows that training uses, in `expert_ids`, without `rebuilt_ids`.

        Args:
            routing: see `PrefixRouting`.
            no_route: id of an unknown route.
        """
        if self.rebuilt_ids is None:
            return self
        assert self.row_versions is not None
        if routing == "rebuilt":
            return replace(self, expert_ids=self.rebuilt_ids, rebuilt_ids=None)
        if routing == "live":
            is_old = self.row_versions < self.row_versions[-1]
            return replace(
                self,
                expert_ids=np.where(is_old[:, None, None], self.expert_ids.dtype.type(no_route), self.expert_ids),
                rebuilt_ids=None,
            )
        return replace(self, rebuilt_ids=None)

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy is trained on. The last one of an incomplete response has no advantage yet."""
        return self.response_length - self.trained_tokens - (not self.is_finished)

    @property
    def value_tokens(self) -> int:
        """Tokens whose value has a return to learn from."""
        return self.response_length if self.is_finished else 0


def routing_of(
    sequences: Sequence_[Sequence],
    *,
    num_experts: int,
    shape: tuple[int, int],
    layer_indices: Array,
    step: int,
    model: str,
) -> RoutingTrace:
    """The routing of a rank's sequences; `shape` is (L, K)."""
    return RoutingTrace.from_sequences(
        [sequence.expert_ids for sequence in sequences],
        num_experts=num_experts,
        shape=shape,
        layer_indices=layer_indices,
        prompt_lengths=[sequence.prompt_length for sequence in sequences],
        steps=step,
        sequence_hashes=[hash_tokens(sequence.token_ids) for sequence in sequences],
        prompt_hashes=[hash_tokens(sequence.token_ids[: sequence.prompt_length]) for sequence in sequences],
        windows=[sequence.windows for sequence in sequences],
        model=model,
    )


def gather_lengths(sequences: Sequence_[Sequence]) -> list[Array]:
    """Tokens `[S_r, 3]` of every rank's sequences, in rank order: fed, of the policy, of a value model. Collective."""
    mine = np.array([(s.num_fed, s.policy_tokens, s.value_tokens) for s in sequences], np.int64).reshape(-1, 3)
    parts: list[Array | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return [part for part in parts if part is not None]


def exchange_sequences(sequences: Sequence_[Sequence], ranks: Array, device: torch.device) -> list[Sequence]:
    """Send each sequence to its rank, and return those received, ordered by source rank, then as sent. Collective.

    Args:
        sequences: of this rank.
        ranks: `[S]` destination of each.
        device: of the communication.
    """
    num_ranks = dist.get_world_size()
    packed = [
        pickle.dumps([sequence for sequence, rank in zip(sequences, ranks, strict=True) if rank == destination])
        for destination in range(num_ranks)
    ]
    sizes_out = torch.tensor([len(data) for data in packed], device=device)
    sizes_in = torch.empty_like(sizes_out)
    dist.all_to_all_single(sizes_in, sizes_out)
    sent = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8).to(device)
    arrived = sent.new_empty(int(sizes_in.sum()))
    dist.all_to_all_single(arrived, sent, sizes_in.tolist(), sizes_out.tolist())
    received = [pickle.loads(part.cpu().numpy().tobytes()) for part in arrived.split(sizes_in.tolist())]
    return [sequence for part in received for sequence in part]
