"""`python -m benchmarks.payload`: size and speed of packed routing, beside plain arrays and zstd.

Bring synthetic routing of 48 layers, top-8 of 128 experts, from the rollout's int32 into bytes and back, a sequence at
a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.harness import Figures, main
from benchmarks.routing import EXPERTS, LAYERS, long_responses, sizes_of, sizes_text
from benchmarks.tables import Columns, figure_table, named_rows, quantity
from trimtab.array_type import Array
from trimtab.calibration.alternating_rounds import alternate
from trimtab.cli.options import add_options, positive
from trimtab.cli.parser import Parser
from trimtab.report.number_text import bytes_text, seconds
from trimtab.trace import pack, unpack

Form = tuple[Callable[[Array], bytes], Callable[[bytes], Any]]


def _plain(dtype: Any) -> Form:
    return lambda ids_TLK: ids_TLK.astype(dtype).tobytes(), lambda data: np.frombuffer(data, dtype).copy()


def _zstd(dtype: Any) -> Form:
    def decompress(data: bytes) -> Array:
        size = int.from_bytes(data[:8], "little")
        return np.frombuffer(pa.decompress(data[8:], size, "zstd", asbytes=True), dtype)

    def compress(ids_TLK: Array) -> bytes:
        plain = ids_TLK.astype(dtype).tobytes()
        return len(plain).to_bytes(8, "little") + pa.compress(plain, "zstd", asbytes=True)

    return compress, decompress


FORMS: dict[str, Form] = {
    "int32": _plain(np.int32),
    "int16": _plain(np.int16),
    "int32, zstd": _zstd(np.int32),
    "int16, zstd": _zstd(np.int16),
    "pack": (lambda ids_TLK: pack(ids_TLK, EXPERTS), unpack),
}


def add_to(parser: Parser) -> None:
    """Add the options."""
    add_options(parser, "--tokens", type=positive, default=200_000, help="tokens of all sequences")
    add_options(parser, "--rounds", default=5)


def run_benchmark(tokens: int, rounds: int, seed: int = 0) -> Figures:
    """Bring the routing of every sequence into each form and back, the forms in turns.

    Args:
        tokens: approximate number of tokens.
        rounds: counted runs of each form. They follow one that is not counted.
        seed: of routing and its order within a token.
    """
    trace = long_responses(tokens, seed=seed)
    # As a rollout returns it: in int32, in the router's order.
    rng = np.random.default_rng(seed)
    sequences = [rng.permuted(trace.sequence(index).astype(np.int32), axis=-1) for index in range(trace.num_sequences)]
    variants = {name: partial(_pack_and_unpack, form, sequences) for name, form in FORMS.items()}
    results = alternate(variants, rounds, warm_up=1, progress="bench payload")
    sizes = {name: runs[0][0] for name, runs in results.items()}
    rows = trace.num_tokens * LAYERS
    return {
        "schema": "trimtab-bench-payload-1",
        **sizes_of(trace),
        "forms": {
            name: {
                "bytes": sizes[name],
                "bytes_per_row": sizes[name] / rows,
                "over_int32": sizes[name] / sizes["int32"],
                "pack_s": statistics.median(pack_s for _, pack_s, _ in runs),
                "unpack_s": statistics.median(unpack_s for _, _, unpack_s in runs),
            }
            for name, runs in results.items()
        },
    }


def _pack_and_unpack(form: Form, sequences: list[Array]) -> tuple[int, float, float]:
    """Bytes of all sequences in a form, and seconds of bringing them into it and back."""
    write, read = form
    start = time.perf_counter()
    payloads = [write(ids_TLK) for ids_TLK in sequences]
    middle = time.perf_counter()
    for payload in payloads:
        read(payload)
    return sum(map(len, payloads)), middle - start, time.perf_counter() - middle


def print_figures(figures: Figures, console: Console) -> None:
    """Print one line per form."""
    columns: Columns = {
        "form": "{name}",
        "size": quantity("bytes", bytes_text),
        "of int32": "{over_int32:.1%}",
        "bytes a token and layer": "{bytes_per_row:.2f}",
        "to bytes": quantity("pack_s", seconds),
        "and back": quantity("unpack_s", seconds),
    }
    console.print(figure_table(sizes_text(figures), columns, named_rows(figures["forms"])))


if __name__ == "__main__":
    main("benchmarks.payload")
