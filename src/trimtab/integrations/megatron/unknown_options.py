"""Options of a newer Megatron that Trimtab has no knowledge of. Needs no Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from trimtab.integrations.megatron.option_tables import IMMOVABLE, UNKNOWN, names

_WATCHED, _HARMLESS = re.compile(UNKNOWN["watched"]), re.compile(UNKNOWN["harmless"])


def unknown_options(config: Any) -> Iterator[str]:
    """Yields `name=value` of options that may matter to experts, are not at their default, and are not known here.

    Args:
        config: a TransformerConfig, DistributedDataParallelConfig or OptimizerConfig; others have none.
    """
    known = {*UNKNOWN["known"].split(), *names(), *(option.name for option in IMMOVABLE)}
    for field in fields(config) if hasattr(config, "__dataclass_fields__") else ():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name, default)
        if field.name in known or not _WATCHED.search(field.name) or _HARMLESS.match(field.name):
            continue
        if not callable(value) and value != default:
            yield f"{field.name}={value}"
