"""Megatron-core: the experts of a `GPTModel` (or any model of `MoELayer`s) balanced in the user's own training run.

session = trimtab.integrations.megatron.balance(model_chunks)
run = session.planned(get_forward_backward_func(), routing)
run(forward_step_func=forward_step, data_iterator=data, model=model_chunks, num_microbatches=8, ...)

Megatron-core is imported when a name is used, and checked for the names that `megatron_names` lists; `option_tables`
does without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.integrations.megatron.balancing import MegatronSession, balance

__all__ = ["MegatronSession", "balance"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import_module(f"{__name__}.megatron_names").check_megatron()
        return getattr(import_module(f"{__name__}.balancing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
