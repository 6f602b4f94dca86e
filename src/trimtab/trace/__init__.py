"""Routing traces: routing of whole sequences, as recorded by a rollout, and their Parquet files.

Start with `routing.py` (`RoutingTrace`), then `store.py` (files) and `formats/importing.py` (dumps of frameworks).
"""

from trimtab.trace.formats.records import ImportOptions
from trimtab.trace.packed_routes import pack, unpack
from trimtab.trace.presets import PRESETS, SkewPreset, synthesize_preset
from trimtab.trace.routing import RoutingTrace, hash_tokens, id_dtype, no_route
from trimtab.trace.sequence_facts import SequenceFacts
from trimtab.trace.store import TraceReader, read_trace, write_trace
from trimtab.trace.synth import synthesize
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
