"""Kernels in Triton give what plain torch gives, in Triton's interpreter, and compile for GPUs that aren't here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.interpreted_kernels import interpreted_kernels
from helpers.programs import run_on_rank
from helpers.rank_pool import on_ranks
from helpers.rank_tests import runs_on_ranks
from trimtab.runtime.program import device_kernels

triton = pytest.importorskip("triton")

INTERPRETED = "interpreter"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROW_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SEEDS = st.integers(0, 2**32 - 1)
drawn = settings(max_examples=examples(short=25, long=400), deadline=None, database=None)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with their columns together in memory."""
    return tensor.t().contiguous().t()


@runs_on_ranks(1, patched=INTERPRETED)
def test_gradients_of_weighted_sums_are_rounded_once() -> None:
    """The gradients of rows are those of plain torch, bit by bit; of weights, plain torch rounds more often."""

    @drawn
    @example(0, 0, 1, 40, torch.bfloat16, torch.float32, False)
    @example(0, 2, 3, 1500, torch.bfloat16, torch.float32, True)
    @given(
        SEEDS, st.integers(0, 5), st.integers(1, 5), st.sampled_from([1, 3, 40, 1500]), ROW_DTYPES,
        st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
    )  # fmt: skip
    def check(
        seed: int, tokens: int, top_k: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, is_strided: bool
    ) -> None:
        torch.manual_seed(seed)
        row_places = torch.randperm(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
        row_tokens = (row_places.view(-1).argsort() // top_k).to(torch.int32)
        grad, rows = torch.randn(tokens, width).to(dtype), torch.randn(tokens * top_k, width).to(dtype)
        weights = torch.rand(tokens, top_k).to(weight_dtype)
        if is_strided:
            grad, weights = strided(grad), strided(weights)
        found = interpreted_kernels().combine_gradients(grad, rows, weights, row_places)
        plain = device_kernels.combine_gradients(grad, rows, weights, row_tokens, row_places)
        assert torch.equal(found[0], plain[0])

        gathered = rows.double()[row_places.long()]
        exact_rows = torch.empty(rows.shape, dtype=torch.float64)
        exact_rows[row_places.long()] = weights.double()[:, :, None] * grad.double()[:, None]
        products = gathered * grad.double()[:, None]
        for one, exact, order in (
            (found[0], exact_rows, 2**-24 * exact_rows.abs()),
            (found[1], products.sum(-1), 2**-19 * products.abs().sum(-1)),
        ):
            kind = torch.finfo(one.dtype)
            rounding = kind.eps / 2 * exact.abs().clamp(min=kind.smallest_normal)
            assert ((one.double() - exact).abs() <= rounding + order).all()
        assert (found[0].dtype, found[1].dtype, found[1].shape) == (dtype, weight_dtype, weights.shape)

    check()


@runs_on_ranks(1, patched=INTERPRETED)
def test_arrivals_are_added_in_plan_order() -> None:
    @drawn
    @given(
        SEEDS,
        st.lists(st.tuples(st.sampled_from([1, 7, 1024, 1040, 3000]), st.integers(1, 4)), min_size=1, max_size=4),
        ROW_DTYPES, st.integers(0, 1),
    )  # fmt: skip
    def check(seed: int, sizes: list[tuple[int, int]], dtype: torch.dtype, offset: int) -> None:
        torch.manual_seed(seed)

        def draw(size: int) -> torch.Tensor:
            # Of very different sizes, so that their order matters.
            return (torch.randn(size + offset) * 10 ** torch.randint(-4, 5, ()))[offset:]

        targets = [draw(size).to(dtype) for size, _ in sizes]
        arrivals = [[draw(size) for _ in range(count)] for size, count in sizes]
        plain = [target.clone() for target in targets]
        versions = [target._version for target in targets]
        interpreted_kernels().add_arrivals(targets, arrivals)
        assert all(target._version > before for target, before in zip(targets, versions, strict=True))
        device_kernels.add_arrivals(plain, arrivals)
        assert all(torch.equal(one, other) for one, other in zip(targets, plain, strict=True))

    check()


@runs_on_ranks(1, patched=INTERPRETED)
def test_wrong_kernels_are_not_used() -> None:
    """Kernels are compared with plain torch on the device before their first use."""
    kernels = interpreted_kernels()
    device_kernels.check_kernels(kernels, CPU)
    wrong: dict[str, Callable[..., Any]] = {
        "combine_gradients": lambda *given: kernels.combine_gradients(*given)[::-1],
        "add_arrivals": lambda targets, arrivals: kernels.add_arrivals(targets, [each[:1] for each in arrivals]),
        "multi_hot": lambda ids, weights, count: kernels.multi_hot(ids, weights + 1, count),
    }
    for name, kernel in wrong.items():
        some = SimpleNamespace(**{**{each: getattr(kernels, each) for each in wrong}, name: kernel})
        device_kernels.kernels_on.cache_clear()
        with mock.patch.object(device_kernels, "load_kernels", return_value=some):
            assert device_kernels.kernels_on(CPU) is None
    device_kernels.kernels_on.cache_clear()


@runs_on_ranks(1, patched=INTERPRETED)
def test_multi_hot_places_have_gradients() -> None:
    @drawn
    @example(0, 0, 1, 4, torch.float32, False)
    @given(SEEDS, st.integers(0, 5), st.integers(1, 4), st.sampled_from([4, 7, 40, 1500]), ROW_DTYPES, st.booleans())
    def check(seed: int, tokens: int, top_k: int, count: int, dtype: torch.dtype, is_strided: bool) -> None:
        torch.manual_seed(seed)
        ids = torch.rand(tokens, count).argsort(1)[:, :top_k].to(torch.uint16)
        weights, gradient = torch.randn(tokens, top_k).to(dtype), torch.randn(tokens, count).to(dtype)
        results = []
        for kernels in (interpreted_kernels(), None):
            leaf = (strided(weights) if is_strided else weights).clone().requires_grad_()
            with mock.patch.object(device_kernels, "kernels_on", return_value=kernels):
                routing_map, probs = device_kernels.multi_hot(ids, leaf, count)
                probs.backward(gradient)
            assert (routing_map.dtype, routing_map.requires_grad, probs.dtype) == (torch.bool, False, dtype)
            assert leaf.grad is not None
            results.append((routing_map, probs.detach(), leaf.grad))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        # By the definition, without `scatter`.
        is_here = ids.long()[:, :, None] == torch.arange(count)
        assert torch.equal(results[0][0], is_here.any(1))
        assert torch.equal(results[0][1], (is_here * weights[:, :, None]).sum(1).to(dtype))
        assert torch.equal(results[0][2], (is_here * gradient[:, None]).sum(2).to(dtype))

    check()


def run_interpreted(lines: list[str]) -> dict[str, int]:
    """Calls of each kernel while cases are compared with one process that holds the whole model."""
    kernels, calls = interpreted_kernels(), {"combine_gradients": 0, "add_arrivals": 0}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return getattr(kernels, name)(*arguments)

        return call

    chosen = SimpleNamespace(**{name: counted(name) for name in calls})
    with mock.patch.object(device_kernels, "kernels_on", return_value=chosen):
        for line in lines:
            run_on_rank(line)
    return calls


def test_training_with_kernels_equals_the_single_process() -> None:
    """On three ranks, since with two an expert gets the gradients of one replica at most."""
    lines = [f"35, ranks: 3, precision: float32, slots: 4{more}" for more in ("", ", tensors: lists")]
    for calls in on_ranks(run_interpreted, (lines,), ranks=3, patched=INTERPRETED):
        assert min(calls.values()) > 0


@pytest.fixture
def driver_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A driver for a GPU of an architecture, which compiles kernels and can't run them."""

    def use(architecture: int) -> None:
        target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
        # Compiled kernels are kept for each device number.
        driver = SimpleNamespace(
            get_current_device=lambda: architecture, get_current_stream=lambda _: 0, get_current_target=lambda: target
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(architecture, 10))

    device_kernels.kernels_on.cache_clear()
    yield use
    device_kernels.kernels_on.cache_clear()


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_compile_without_local_memory(
    architecture: int, driver_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the sizes of Qwen3-30B-A3B: every launch compiles its kernel as it would on the GPU, and does not run it."""
    compiled: list[Any] = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(function, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver_of(architecture)
    kernels = device_kernels.load_kernels(GPU)
    assert kernels is not None
    tokens, top_k, width, count = 4, 8, 2048, 160
    weights = torch.zeros(tokens, top_k)
    for dtype in (torch.bfloat16, torch.float32):
        grad, rows = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens * top_k, width, dtype=dtype)
        kernels.combine_gradients(grad, rows, weights, torch.zeros(tokens, top_k, dtype=torch.int32))
        for size in (1024, 1000):
            kernels.add_arrivals([torch.zeros(size, dtype=dtype)], [[torch.zeros(size)] * 2])
        kernels.multi_hot(torch.zeros(tokens, top_k, dtype=torch.uint16), weights.to(dtype), count)
    assert len({id(kernel) for kernel in compiled}) == 8
    # Rows and aligned gradients are read 16 bytes at a time.
    assert all("global.v4" in kernel.asm["ptx"] for kernel in compiled[:2])
    for kernel in compiled:
        file = tmp_path / f"{kernel.hash}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f".target sm_{architecture}" in kernel.asm["ptx"]
        assert (re.findall(r"STACK:(\d+)", usage), re.findall(r"LOCAL:(\d+)", usage)) == (["0"], ["0"])
        assert not re.search(r"(ld|st)\.local|cvt\.r[zmp]", kernel.asm["ptx"])


def test_only_some_gpus_get_kernels(driver_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    driver_of(80)
    assert device_kernels.kernels_on(CPU) is device_kernels.kernels_on(GPU) is None
    device_kernels.kernels_on.cache_clear()
    driver_of(90)
    # As without a driver or a C compiler, Triton raises.
    monkeypatch.setenv("TRITON_DEFAULT_BACKEND", "missing")
    for name in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, name, None)
    assert device_kernels.kernels_on(GPU) is None
