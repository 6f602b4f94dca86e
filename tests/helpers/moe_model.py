"""A small hand-written MoE model: on one process with plain loops, or with its experts in a Session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.array_type import Array
from trimtab.runtime import ExpertLayer, ExpertWeight, RowGroups, Session, gated_experts
from trimtab.runtime.layer.dispatch import Dispatcher
from trimtab.runtime.program.grouped_products import ApplyExperts


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        lists: names of expert tensors that are lists of Parameters, one for each expert, instead of stacks.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    vocab: int = 11
    lists: tuple[str, ...] = ()


ALL_LISTS = ("gate_up", "down")
Experts = nn.Parameter | nn.ParameterList


class MoEBlock(nn.Module):
    """A router and its experts.

    Attributes:
        rows_run: rows that experts of this rank have computed in a session.
        checkpoints_function: the function of the experts is checkpointed.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False, dtype=dtype)
        scale = shape.hidden**-0.5
        gate_up = torch.randn(shape.experts, 2 * shape.width, shape.hidden, dtype=dtype) * scale
        down = torch.randn(shape.experts, shape.hidden, shape.width, dtype=dtype) * scale
        self.gate_up = _experts(gate_up, "gate_up" in shape.lists)
        self.down = _experts(down, "down" in shape.lists)
        self.layer: ExpertLayer | None = None
        self.rows_run, self.checkpoints_function = 0, False
        self.is_read = False
        self.compute_dtype: torch.dtype | None = None
        self.recorded_ids: torch.Tensor | None = None
        self.top_k = shape.top_k

    def share(self, session: Session, dispatcher: Dispatcher | None = None) -> None:
        """Keep this rank's home experts only, and run them in the session."""
        self.gate_up, self.down = (_home(tensor, session.home_experts) for tensor in (self.gate_up, self.down))
        self.run_in(session, dispatcher)

    def run_in(self, session: Session, dispatcher: Dispatcher | None = None) -> None:
        """Run the experts that the rank has in a session, which reads them again each time if `is_read`."""
        self.layer = session.add_layer(
            self.tensors if self.is_read else self.tensors(),
            partial(self._count_and_run, gated_experts()),
            compute_dtype=self.compute_dtype,
            dispatcher=dispatcher,
            by_expert=lambda: [self.router.weight],
        )

    def _count_and_run(
        self, apply: ApplyExperts, weights: Sequence[ExpertWeight], rows: torch.Tensor, groups: RowGroups
    ) -> torch.Tensor:
        self.rows_run += len(rows)
        if self.checkpoints_function:
            part: torch.Tensor = checkpoint(lambda x: apply(weights, x, groups), rows, use_reentrant=False)
            return part
        return apply(weights, rows, groups)

    def tensors(self) -> list[nn.Parameter | list[nn.Parameter]]:
        return [t if isinstance(t, nn.Parameter) else list(t) for t in (self.gate_up, self.down)]

    def expert_parameters(self) -> list[nn.Parameter]:
        return [p for t in (self.gate_up, self.down) for p in ([t] if isinstance(t, nn.Parameter) else t)]

    def forward(
        self, x: torch.Tensor, checkpoint_experts: str = "", chosen_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self.router(x)
        if self.layer is not None:
            ids = self.layer.route(logits.topk(self.top_k).indices)
            if chosen_ids is not None:
                ids = torch.where(chosen_ids < 0, ids, chosen_ids)
            weights = logits.softmax(-1).gather(1, ids)
            if checkpoint_experts:
                reentrant = checkpoint_experts == "reentrant"
                output: torch.Tensor = checkpoint(self.layer, x, ids, weights, use_reentrant=reentrant)
                return output
            return self.layer(x, ids, weights)
        ids = logits.topk(self.top_k).indices
        if self.recorded_ids is not None:
            ids = torch.where(self.recorded_ids < 0, ids, self.recorded_ids)
        weights = logits.softmax(-1).gather(1, ids)
        out = torch.zeros_like(x)
        for expert in range(len(self.gate_up)):
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, dim=-1)
            rows = (nn.functional.silu(gate) * up) @ self.down[expert].T
            out = out.index_add(0, token, rows * weights[token, k, None])
        return out


class TinyMoE(nn.Module):
    """Embedding, MoE blocks with a residual and a dense mix, head. Tokens are independent.

    Attributes:
        run_block: how blocks run, see `_RUN`.
        before_block: called with the index of each block and its input, which it returns.
        skipped: blocks that are left out.
        chosen_ids: for each block in a session, ids `[n, K]` in place of the recorded ones, which stay where it is -1.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, run_block: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden, dtype=dtype)
        self.mixes = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden, dtype=dtype) for _ in range(shape.layers))
        self.blocks = nn.ModuleList(MoEBlock(shape, dtype) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, dtype=dtype)
        self.run_block = run_block
        self.before_block: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        self.skipped: frozenset[int] = frozenset()
        self.chosen_ids: list[torch.Tensor] | None = None

    def share(self, session: Session, dispatcher: Dispatcher | None = None) -> None:
        for block in self.moe_blocks():
            block.share(session, dispatcher)

    def moe_blocks(self) -> list[MoEBlock]:
        return [block for block in self.blocks if isinstance(block, MoEBlock)]

    def replicated(self) -> list[nn.Parameter]:
        experts = {id(p) for block in self.moe_blocks() for p in block.expert_parameters()}
        return [p for p in self.parameters() if id(p) not in experts]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.run(self.embed(tokens), 0, len(self.blocks)))
        return logits

    def run(self, x: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Blocks `first` to `end - 1`, a pipeline chunk."""
        for index in range(first, end):
            mix, block = self.mixes[index], self.moe_blocks()[index]
            if self.before_block is not None:
                x = self.before_block(index, x)
            if index in self.skipped:
                continue
            # Bound here: a checkpointed block may be recomputed after later forwards that run otherwise.
            chosen_ids = None if self.chosen_ids is None else self.chosen_ids[index]
            checkpoint_experts = _CHECKPOINTED_EXPERTS.get(self.run_block, "")
            mix_and_experts = partial(_mix_and_experts, mix, block, checkpoint_experts, chosen_ids)
            x = _RUN.get(self.run_block, _RUN["plain"])(mix_and_experts, x)
        return x


def matches(
    model: TinyMoE, reference: TinyMoE
) -> Iterator[tuple[str, nn.Parameter, nn.Parameter, torch.Tensor | EllipsisType]]:
    """Parameters of a model in a session, with those of the whole model and the part `[index]` that the rank holds."""
    whole = dict(reference.named_parameters())
    homes: dict[str, torch.Tensor] = {}
    for at, block in enumerate(model.moe_blocks()):
        assert block.layer is not None
        homes |= {f"blocks.{at}.{name}": torch.from_numpy(block.layer.home_experts) for name in ALL_LISTS}
    for name, parameter in model.named_parameters():
        head, _, row = name.rpartition(".")
        if name in homes:
            yield name, parameter, whole[name], homes[name]
        elif head in homes:
            yield name, parameter, whole[f"{head}.{homes[head][int(row)]}"], ...
        else:
            yield name, parameter, whole[name], ...


def _experts(stack: torch.Tensor, is_list: bool) -> Experts:
    return nn.ParameterList(part.clone() for part in stack) if is_list else nn.Parameter(stack)


def _home(tensor: Experts, home: Array) -> Experts:
    """Copies of the experts with these ids."""
    return _experts(torch.stack([tensor[int(e)].detach() for e in home]), isinstance(tensor, nn.ParameterList))


def _mix_and_experts(
    mix: nn.Module, block: MoEBlock, checkpoint_experts: str, chosen_ids: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    mixed: torch.Tensor = x + block(torch.tanh(mix(x)), checkpoint_experts, chosen_ids)
    return mixed


def _nested(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return torch.sin(checkpoint(function, torch.cos(x), use_reentrant=reentrant))


# Checkpoints around the experts only, without the router.
_CHECKPOINTED_EXPERTS = {"checkpointed experts": "plain", "reentrantly checkpointed experts": "reentrant"}

# Functions that run a block, with equal results.
WITHOUT_CHECKPOINTS = {"nested checkpoint": "nested", "nested reentrant checkpoint": "nested"}

_RUN: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "plain": lambda function, x: function(x),
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "checkpoint without early stop": lambda function, x: checkpoint(function, x, use_reentrant=False, early_stop=False),
    "reentrant checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "nested": lambda function, x: torch.sin(function(torch.cos(x))),
    "nested checkpoint": lambda function, x: checkpoint(_nested, function, x, False, use_reentrant=False),
    "nested reentrant checkpoint": lambda function, x: checkpoint(_nested, function, x, True, use_reentrant=True),
}
