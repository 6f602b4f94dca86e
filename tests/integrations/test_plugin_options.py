"""Options of plugins: the text of a variable and a part of a config say the same, and mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.integrations.options import PluginOptions

SOURCE = "TRIMTAB_BALANCE"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", PluginOptions("plan", "auto")),
        ("mode=shadow", PluginOptions("shadow", "auto")),
        (" slots_per_rank=6\n mode=live ", PluginOptions("live", 6)),
        ("slots_per_rank=0 mode=off", PluginOptions("off", 0)),
    ],
)
def test_text_and_mapping_say_the_same(text: str, options: PluginOptions) -> None:
    assert PluginOptions.from_text(text, source=SOURCE) == options
    values: dict[str, Any] = {"mode": options.mode, "slots_per_rank": options.slots_per_rank}
    assert PluginOptions.from_mapping(values, source=SOURCE) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan", "has 'plan'; .* 'mode=plan slots_per_rank=auto'"),
        ("mode=plan mode=off", "has mode twice"),
        ("slots=2", "no option 'slots'; it has mode, slots_per_rank"),
        ("mode=Plan", "mode=Plan; it should be one of plan, "),
        ("slots_per_rank=two", "slots_per_rank=two; it should be auto, or an integer"),
        ("slots_per_rank=-1", "slots_per_rank=-1; it should be auto, or an integer, 0 or more"),
        ("slots_per_rank=", "slots_per_rank=; it should be auto, or an integer"),
    ],
)
def test_mistakes_are_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^TRIMTAB_BALANCE .*{message}") as error:
        PluginOptions.from_text(text, source=SOURCE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [True, 2.0, None, [2]])
def test_a_config_s_value_has_to_be_a_count(value: Any) -> None:
    with pytest.raises(InputError, match=r"slots_per_rank=.* should be auto, or an integer"):
        PluginOptions.from_mapping({"slots_per_rank": value}, source="trimtab of the config")
