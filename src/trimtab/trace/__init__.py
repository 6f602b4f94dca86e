"""What did the router choose? Routing of whole sequences, as recorded by a rollout, and its Parquet store."""

from trimtab.trace.routing import RoutingTrace, hash_tokens, id_dtype, no_route
from trimtab.trace.store import read_trace, write_trace
from trimtab.trace.synth import synthesize

__all__ = ["RoutingTrace", "hash_tokens", "id_dtype", "no_route", "read_trace", "synthesize", "write_trace"]
