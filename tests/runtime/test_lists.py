"""Experts as lists of tensors, one Parameter for each; complements `tests/runtime/test_equality.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.moe_model import ALL_LISTS, Shape
from helpers.planned_steps import Step, make
from helpers.rank_tests import runs_on_ranks
from helpers.tiny_training import renumber
from trimtab.errors import InputError, RanksDisagreeError
from trimtab.runtime import RowGroups, Session, gated_experts
from trimtab.runtime.program import grouped_products
from trimtab.runtime.state.whole_state import find_number

SHAPE = Shape(layers=2, experts=8, top_k=2, hidden=16, width=8, lists=ALL_LISTS)
HOME = SHAPE.experts // 2


class Allocations(TorchDispatchMode):
    """Records operations whose results are as large as a stack of the home experts."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            is_weight = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim == 3
            if is_weight and tensor.shape[0] == HOME:
                self.large.append(str(func))
        return result


@runs_on_ranks()
def test_lists_are_never_stacked() -> None:
    for lists in (ALL_LISTS, ()):
        session, model, _ = make(shape=replace(SHAPE, lists=lists))
        step = Step(3, shape=SHAPE)
        assert step.plan.num_replicas > 0
        step.apply(session)
        with Allocations() as allocations:
            step.run(session, model)
        # `Allocations` detects stacks.
        assert (not allocations.large) == bool(lists)


@runs_on_ranks()
def test_experts_without_rows_have_zero_gradients() -> None:
    """Zeros on every rank, also in a layer without rows."""
    session = Session(num_experts=4)
    tensors = [[torch.nn.Parameter(torch.randn(*size)) for _ in range(2)] for size in ((8, 4), (4, 4))]
    layer = session.add_layer(tensors, gated_experts())
    hidden = torch.randn(3, 4)
    layer(hidden, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).sum().backward()
    for of_tensor in tensors:
        busy = [bool(parameter.grad.any()) for parameter in of_tensor if parameter.grad is not None]
        assert busy == [session.rank == 0, False]


@runs_on_ranks()
def test_invalid_lists_are_refused_with_their_name() -> None:
    session = Session(num_experts=4)

    def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.randn(*shape)) for shape in shapes]

    def refused(message: str, *tensors: Any, **settings: Any) -> None:
        with pytest.raises(InputError, match=message):
            session.add_layer(tensors, gated_experts(), **settings)

    good, down = parameters((8, 4), (8, 4)), parameters((4, 4), (4, 4))
    first, second = session.home_experts
    refused(r"layer 0: expert list 1 has 1 tensors; this rank is home to 2 experts", good, down[:1])
    refused(
        rf"layer 0: expert tensor 1 of expert {second} is \[4, 5\] torch.float32, trained, and \[4, 4\] .* of expert "
        rf"{first}",
        good, parameters((4, 4), (4, 5)),
    )  # fmt: skip
    half = [down[0], torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))]
    refused(rf"expert tensor 1 of expert {second} is \[4, 4\] torch.bfloat16, trained", good, half)
    frozen = [down[0], torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)]
    refused(rf"expert tensor 1 of expert {second} is \[4, 4\] torch.float32, frozen", good, frozen)
    meta = [down[0], torch.nn.Parameter(torch.empty(4, 4, device="meta"))]
    refused(rf"expert tensor 1 of expert {second} has no memory; load it", good, meta)
    shared = rf"expert tensor 0 of expert {first} and expert tensor 0 of expert {second} share memory"
    refused(shared, [good[0], good[0]], down)
    refused(shared, [good[0], torch.nn.Parameter(good[0].data)], down)
    refused("is of type list", [[1], [2]], down)
    refused("should be stacks", good, down, weights=list)
    refused("should be stacks", *parameters((2, 8, 4)), down, weights=list)
    refused("`refresh` needs `weights`", good, down, refresh=list)
    session.add_layer([good, down], gated_experts())
    refused("layer 1 was added with an expert tensor of MoE layer 0", parameters((8, 4), (8, 4)), [down[1], down[0]])

    down[1].requires_grad_(False)
    with pytest.raises(InputError, match=r"expert tensor 1 of expert \d is \[4, 4\] torch.float32, frozen, and"):
        session.live_micro_step(positions=torch.arange(3)).__enter__()
    down[1].requires_grad_()
    good[1].data = good[1].data.double()
    with pytest.raises(InputError, match=r"expert tensor 0 of expert \d was added as \[8, 4\] torch.float32 and is"):
        session.live_micro_step(positions=torch.arange(3)).__enter__()


@runs_on_ranks()
def test_undetected_write_is_reported_with_the_expert() -> None:
    session, _, _ = make(shape=SHAPE, verify_weights=True)
    with session.live_micro_step(positions=torch.arange(3)):
        pass
    if session.rank == 1:
        session.layers[1].parameters[HOME + 2].data.mul_(2)
    expert = int(session.num_experts - HOME + 2)
    with pytest.raises(RuntimeError, match=f"layer 1: tensor 1 of expert {expert} changed without"):
        session.live_micro_step(positions=torch.arange(3)).__enter__()


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (
            "one rank", InputError,
            r"AdamW: the state of MoE layer 1, expert tensor 1 is .*'step': 5.0.* for expert 6 and .*'step': 1.0.* for "
            "expert 4",
        ),
        ("no state", InputError, r"expert tensor 1 is empty for expert \d and .*'step': 1.0"),
        ("all ranks", RanksDisagreeError, r"optimizer state of MoE layer 1, expert tensor 1 is .*'step': 0"),
    ],
)  # fmt: skip
@runs_on_ranks()
def test_experts_with_states_that_differ_are_not_renumbered(where: str, error: type[Exception], message: str) -> None:
    session, model, _ = make(shape=SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    session.register_optimizers(optimizer)
    step = Step(3, shape=SHAPE)
    step.apply(session)
    step.run(session, model)
    optimizer.step()
    optimizer.zero_grad()
    parameters = session.layers[1].parameters[HOME:]
    if where == "one rank" and session.rank == 1:
        optimizer.state[parameters[2]]["step"] = torch.tensor(5.0)
    elif where == "no state":
        del optimizer.state[parameters[1]]
    elif where == "all ranks":
        for parameter in parameters:
            optimizer.state[parameter]["step"] = torch.tensor(float(session.rank))
    with pytest.raises(error, match=message):
        renumber(session, 1)
    assert session.numbering is None


@runs_on_ranks()
def test_the_whole_state_of_lists_has_the_names_of_all_experts() -> None:
    session, model, reference = make(shape=SHAPE)
    whole = session.whole_state_dict(model)
    assert whole.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(whole[name], value)
    mine = int(session.home_experts[1])
    for state, message in (
        ({n: v for n, v in whole.items() if n != "blocks.1.down.6"}, r"tensor 'blocks.1.down.6' is missing"),
        (whole | {"blocks.1.down.8": torch.zeros(2)}, r"there is a tensor 'blocks.1.down.8'; this model has none"),
        (whole | {f"blocks.1.down.{mine}": torch.zeros(2)}, rf"'blocks.1.down.{mine}' has shape \[2\]; .* \[16, 8\]"),
    ):
        with pytest.raises(InputError, match=message):
            session.whole.load_weights(model, state)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match=r"optimizer state of 'blocks.1.down.8'; this model has no such"):
        session.whole.load_optimizer_state(model, optimizer, {"blocks.1.down.8": {}})
    # Other names, and only some of the experts.
    block = model.moe_blocks()[0]
    assert isinstance(block.down, torch.nn.ParameterList)
    parameters = list(block.down)
    for order in ([1, 0, 2, 3], [0, 1, 2]):
        block.down = torch.nn.ParameterList(parameters[row] for row in order)
        with pytest.raises(InputError, match=r"blocks.0.down.1'.*"):
            session.whole_state_dict(model)


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (["layers.0.experts.0.w1.weight", "layers.0.experts.1.w1.weight"], [], "layers.0.experts.7.w1.weight"),
        (["layers.1.fc1.weight0", "layers.1.fc1.weight1", "layers.1.fc1.weight2"], [], "layers.1.fc1.weight7"),
        (["layers.0.experts.0.w1.weight"], [], "layers.0.experts.7.w1.weight"),
        (["layers.0.experts.0.0.weight"], ["layers.0.experts.0.2.weight"], "layers.0.experts.7.0.weight"),
        (["layers.0.w0"], ["layers.1.w0"], "layers.0.w7"),
        (["layers.0.w0"], ["layers.1.w0", "layers.0.w1"], None),
        (["experts.1.w", "experts.0.w"], [], None),
        (["experts.4.w", "experts.5.w"], [], None),
        (["a.0.experts.0.w", "a.1.experts.1.w"], [], None),
        (["experts.0.w", "experts.1.v"], [], None),
        (["w", "w"], [], None),
        (["experts.0.w", "w"], [], None),
    ],
)
def test_the_number_of_an_expert_is_found_in_names(names: list[str], others: list[str], expected: str | None) -> None:
    if expected is not None:
        assert find_number(names, [*names, *others]).with_number(7) == expected
        return
    with pytest.raises(InputError, match=names[0]):
        find_number(names, [*names, *others])


def test_gradients_that_a_kernel_of_a_gpu_does_not_write_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel leaves those of experts without rows as they are."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    written = torch.rand(3, 4, 5)
    monkeypatch.setattr(grouped_products, "_has_grouped_kernel", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *_, offs: written.clone().as_subclass(OnGpu))
    groups = RowGroups.of([3, 0, 2], torch.device("cpu"))
    (found,) = grouped_products._weight_gradients(torch.rand(5, 4), torch.rand(5, 5), groups, is_list=False)
    assert torch.equal(found, written * torch.tensor([1.0, 0.0, 1.0])[:, None, None])
