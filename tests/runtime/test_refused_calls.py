"""What a layer of a session refuses: to be compiled, to be captured in a CUDA graph, and experts in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trimtab import InputError
from trimtab.runtime import Session, gated_experts


class Block(torch.nn.Module):
    """A router and the experts of a session, between two linear layers."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.router, self.linear = torch.nn.Linear(8, 4), torch.nn.Linear(8, 8)
        experts = [torch.nn.Parameter(torch.rand(4, 16, 8)), torch.nn.Parameter(torch.rand(4, 8, 8))]
        self.layer = [session.add_layer(experts, gated_experts())]

    def moe(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        ids = self.layer[0].route(logits.topk(2).indices)
        return self.layer[0](hidden, ids, logits.softmax(-1).gather(1, ids))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.moe(self.linear(hidden)))


class EagerBlock(Block):
    """The same, whose MoE part is not compiled."""

    @torch.compiler.disable
    def moe(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().moe(hidden)


@pytest.fixture
def session() -> Iterator[Session]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    session = Session(num_experts=4)
    yield session
    session.close()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_refused(session: Session) -> None:
    hidden = torch.rand(5, 8)
    with pytest.raises(RuntimeError, match=r"can't run within torch\.compile.*torch\.compiler\.disable"):
        torch.compile(Block(session), backend="eager")(hidden)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_modules_around_the_layer_may_be_compiled(session: Session) -> None:
    hidden, block = torch.rand(5, 8), EagerBlock(session)
    expected = block(hidden)
    assert torch.allclose(torch.compile(block, backend="eager")(hidden), expected)
    torch._dynamo.reset()


def test_captured_layers_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(session)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph"):
        block(torch.rand(5, 8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64])
def test_experts_in_other_formats_are_refused(session: Session, dtype: torch.dtype) -> None:
    experts = torch.nn.Parameter(torch.zeros(4, 8, 8).to(dtype), requires_grad=False)
    with pytest.raises(InputError, match=rf"expert tensor 0 is {dtype}; .* bfloat16, float16"):
        session.add_layer([experts], gated_experts())
