"""Routing traces: routing of whole sequences, as recorded by a rollout, and their Parquet files.

Start with `routing.py` (`RoutingTrace`), then `store.py` (files) and `formats/importing.py` (dumps of frameworks).
Files, packed and synthetic routing are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trimtab.trace.routing import RoutingTrace, SequenceFacts, hash_tokens, id_dtype, no_route

if TYPE_CHECKING:
    from trimtab.trace.formats.records import ImportOptions
    from trimtab.trace.packed_routes import pack, unpack
    from trimtab.trace.presets import PRESETS, SkewPreset, synthesize, synthesize_preset
    from trimtab.trace.store import TraceReader, read_trace, write_trace
    from trimtab.trace.writer import TraceWriter

__all__ = [
    "PRESETS",
    "ImportOptions",
    "RoutingTrace",
    "SequenceFacts",
    "SkewPreset",
    "TraceReader",
    "TraceWriter",
    "hash_tokens",
    "id_dtype",
    "no_route",
    "pack",
    "read_trace",
    "synthesize",
    "synthesize_preset",
    "unpack",
    "write_trace",
]

_MODULES = {
    "formats.records": ("ImportOptions",),
    "packed_routes": ("pack", "unpack"),
    "presets": ("PRESETS", "SkewPreset", "synthesize", "synthesize_preset"),
    "store": ("TraceReader", "read_trace", "write_trace"),
    "writer": ("TraceWriter",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
