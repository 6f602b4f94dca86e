"""Names of the models that come with Trimtab: of presets, and ids on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from functools import cache

from trimtab.cluster.presets import preset_names, read_preset

# Endings of hub ids of the same sizes: trained further, or stored in another format.
_VARIANT = re.compile(
    r"-(base|instruct|thinking|reasoning|chat|it|hf|pt|paddle|original|\d{4}|fp8|bf16|nvfp4|mxfp4|int4|int8"
    r"|awq|gptq|dynamic)$"
)


def hub_ids() -> list[str]:
    """Hub ids of all presets, as their authors write them, without those of variants."""
    return [hub_id for ids in _ids_of_presets().values() for hub_id in ids]


def known_names() -> list[str]:
    """Names of presets, then their hub ids."""
    return [*preset_names("model"), *hub_ids()]


def preset_of(text: str) -> str | None:
    """The preset of a name or hub id in any case; None if there is none.

    Variants of a hub id, such as `-Base`, `-Instruct-2507` or `-FP8`, have the sizes of their model.
    """
    wanted = _plain(text)
    for preset, ids in _ids_of_presets().items():
        if wanted in (preset, *map(_plain, ids)):
            return preset
    return None


def preset_of_label(label: str) -> str | None:
    """The preset that a framework's label of a model means: a name, a hub id, or a path that ends in its last part."""
    last = label.replace("\\", "/").rstrip("/").rpartition("/")[2]
    for preset, ids in _ids_of_presets().items():
        if _plain(last) in (preset, *(_plain(hub_id.partition("/")[2]) for hub_id in ids)):
            return preset
    return None


@cache
def _ids_of_presets() -> dict[str, tuple[str, ...]]:
    """Hub ids by preset."""
    texts = {name: read_preset("model", name) or "" for name in preset_names("model")}
    return {name: tuple(json.loads(text)["hub_ids"]) for name, text in texts.items()}


def _plain(name: str) -> str:
    """In lower case and without endings of variants."""
    name, found = name.lower(), 1
    while found:
        name, found = _VARIANT.subn("", name)
    return name
