"""`ConfigKeys`: the keys of a `config.json`, checked one by one, with a record of those that were read."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import InputError

# Upper limit of all sizes: far above any model, and loops over layers stay short.
_LARGEST = 1 << 20
# Parts of a config with the sizes of the language model or of its layers; a part comes before parts of it.
_PARTS = ("thinker_config", "text_config", "llm_config", "language_config", "ffn_config", "attn_config", "moe")
# Names of a size, and families whose keys are known completely.
_KNOWN = tomllib.loads((Path(__file__).parent / "config_names.toml").read_text(encoding="utf-8"))
NAMES: dict[str, list[str]] = _KNOWN["names"]
FAMILIES: list[str] = _KNOWN["families"]
# Names that may change sizes, and names that look so and don't.
_LIKE_A_SIZE = re.compile(
    "expert|moe|layer|attn|attention|head|hidden|intermediate|ffn|mlp|shared|linear|mamba|ssm|window|chunk|index|latent"
    "|lora|state|conv|width|dim|sparse|dense|block|pattern|types|enum|topk|top_k|ratio"
)
_NO_SIZE = re.compile(
    "rope|rotary|norm|scalar|act_fn|projection|token|router_|loss|quant|vision|audio|image|video|mtp|nextn|auto_map|label"
    "|^(vocab_size_per_layer_input|qk_head_dim|head_dim|num_key_value_heads|n_kv_heads|max_.*|layer_types|chunk_size"
    "|block_size|num_logits_to_keep|no_rope_.*|moe_layer_freq|expand|time_step.*|sliding_window|indexer_types"
    "|index_topk_freq|index_topk_pattern)$"
)


class ConfigKeys:
    """Keys of a config, those of the language model at the top level.

    Attributes:
        where: the file's name, for messages.
        model_types: model types of the config and of its language model.
        used: names that were read, with a value.
        tried: names that were looked for.
        notes: what a reader should know about the sizes.
    """

    def __init__(self, config: dict[str, Any], where: str, overrides: Mapping[str, Any]) -> None:
        self.where = where
        self._values = dict(config)
        for part in _PARTS:
            if isinstance(self._values.get(part), dict):
                self._values |= self._values.pop(part)
        types = config.get("model_type"), self._values.get("model_type")
        self.model_types = tuple(dict.fromkeys(str(name) for name in types if name))
        for name in overrides:
            sizes = [names for names in NAMES.values() if name in names]
            # One that is a name of two sizes changes that which no other name gives.
            for other in sizes[0] if len(sizes) == 1 else ():
                self._values.pop(other, None)
        self._values |= overrides
        self._overrides = tuple(overrides)
        self.used: dict[str, None] = {}
        self.tried = {"model_type"}
        self.notes: list[str] = []

    def is_of(self, *families: str) -> bool:
        """True if the model type begins with one of these names."""
        return any(name.startswith(families) for name in self.model_types)

    def get(self, size: str) -> Any:
        """The value of the first of the names of a size that is there; None if none is, or it is null."""
        return self._find(size)[1]

    def count(self, size: str, *, default: int | None = None, least: int = 1) -> int:
        """The whole number of a size. A list with one number per layer is that number.

        Raises:
            InputError: if it is no number, differs between layers, or is missing and there is no default.
        """
        name, value = self._find(size)
        if value is None:
            if default is None:
                names = NAMES.get(size, [size])
                raise InputError(
                    f"{self.where}: none of the keys {', '.join(names)}; expected the config of a MoE model, or "
                    f"--set {names[0]}=N"
                )
            return default
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, list):
            raise InputError(
                f"{self.where}: {name} should be a whole number, the same in all layers; for a mean layer give it with "
                f"--set {name}=N"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise InputError(f"{self.where}: {name} should be a whole number from {least} to {_LARGEST:,}")
        return value

    def take_first(self, *names: str) -> bool:
        """Replace lists of two by their first values. True if there was one."""
        pairs = [name for name in names if isinstance(self._values.get(name), list) and len(self._values[name]) == 2]
        self._values |= {name: self._values[name][0] for name in pairs}
        return bool(pairs)

    def listed(self, name: str, kind: type[int] | type[str], *, length: int | None = None) -> list[Any]:
        """The values of a list, empty if there is none.

        Args:
            length: number of layers, if the list has a value for each. Further values are of multi-token prediction.

        Raises:
            InputError: if it is not such a list.
        """
        values = self.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise InputError(f"{self.where}: {name} should be a list of {'names' if kind is str else 'whole numbers'}")
        if length is None:
            return values
        predicted = self._values.get("num_nextn_predict_layers")
        extra = predicted if isinstance(predicted, int) else 0
        if len(values) not in (length, length + extra):
            raise InputError(
                f"{self.where}: {name} has {len(values)} entries; it should have one for each of {length} layers"
            )
        return values[:length]

    def ignored(self) -> tuple[str, ...]:
        """Keys that were not read and look like sizes."""
        return tuple(
            name
            for name, value in self._values.items()
            if name not in self.tried
            and _LIKE_A_SIZE.search(name)
            and not _NO_SIZE.search(name)
            and value
            and not isinstance(value, bool | float)
            and value != 1
            and (not isinstance(value, str) or re.search("pattern|enum|types", name))
        )

    def check_overrides(self) -> None:
        """Raise InputError if a given key is none that the sizes of this model follow from."""
        for name in self._overrides:
            if name not in self.tried:
                near = difflib.get_close_matches(name, sorted(self.tried), 1)
                hint = f"did you mean {near[0]}?" if near else f"used are {', '.join(self.used)}"
                raise InputError(f"{self.where}: --set {name}: no key that sizes of this model are read from; {hint}")

    def _find(self, size: str) -> tuple[str, Any]:
        """The first of a size's names with a value, and the value. All names count as looked for."""
        names = NAMES.get(size, [size])
        self.tried.update(names)
        name = next((name for name in names if self._values.get(name) is not None), "")
        if name:
            self.used[name] = None
        return name, self._values.get(name)
