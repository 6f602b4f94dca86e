"""The module that verl imports by its flag, without verl: names that it needs, options, and what it refuses."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import trimtab.integrations
from helpers.verl_signatures import NAMES, parts_of, stand_ins
from trimtab.errors import InputError
from trimtab.integrations.options import PluginOptions
from trimtab.rank_variables import BALANCE

FLAG, VENDOR = "trimtab.integrations.verl", "VERL_ENGINE_VENDOR"


@contextmanager
def imported(lines: list[str] = NAMES, vendor: str | None = None) -> Iterator[Any]:
    """The module, imported by a process whose verl has these names."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_replaced(name)}
    variables = {} if vendor is None else {VENDOR: vendor}
    package: Any = trimtab.integrations
    attribute = vars(package).pop("verl", None)
    try:
        with mock.patch.dict(os.environ):
            for name in (VENDOR, "NCCL_LAUNCH_ORDER_IMPLICIT"):
                os.environ.pop(name, None)
            os.environ.update(variables)
            sys.modules.update(stand_ins(lines))
            yield importlib.import_module(FLAG)
    finally:
        for name in list(filter(is_replaced, sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
        vars(package).pop("verl", None)
        if attribute is not None:
            package.verl = attribute


def is_replaced(module: str) -> bool:
    return module == FLAG or module.split(".")[0] == "verl"


def test_the_flag_chooses_the_engine_and_needs_the_names_of_the_plugin_alone() -> None:
    with imported():
        assert os.environ[VENDOR] == "trimtab"
        assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


# Every class has an `__init__`.
@pytest.mark.parametrize("line", [line for line in NAMES if "__init__" not in line])
def test_a_name_that_is_missing_is_named_at_import(line: str) -> None:
    message = rf"^{re.escape(parts_of(line)[0])} .*; .* fits verl 0\.9\.0 and 0\.9\.1$"
    with pytest.raises(InputError, match=message), imported([each for each in NAMES if each != line]):
        pass


def test_a_parameter_that_is_missing_is_named_at_import() -> None:
    for module, path, parameters in map(parts_of, NAMES):
        if parameters:
            name = f"{module}:{path}"
            lines = [f"{name}(other)" if each.startswith(f"{name}(") else each for each in NAMES]
            message = f"^{re.escape(name)} has no parameter {parameters[0]}[; ]"
            with pytest.raises(InputError, match=message), imported(lines):
                pass


def test_a_module_that_is_missing_is_named_at_import() -> None:
    message = r"^verl\.workers\.engine can't be imported: No module named 'verl\.workers'"
    with pytest.raises(InputError, match=message), imported(["verl:DataProto"]):
        pass


def test_another_vendor_is_refused() -> None:
    with pytest.raises(InputError, match=r"VERL_ENGINE_VENDOR is 'metax', .*; unset it"), imported(vendor="metax"):
        pass
    with imported(vendor="trimtab"):
        assert os.environ[VENDOR] == "trimtab"


def configs(**changes: Any) -> tuple[Any, Any]:
    """Configs of a model and an engine that are supported, but for these values, by their place."""
    model = SimpleNamespace(lora={"rank": 0}, mtp=SimpleNamespace(enable=False))
    engine = SimpleNamespace(
        forward_only=False, override_mcore_model_config={}, router_replay=SimpleNamespace(mode="R3"),
        qat=SimpleNamespace(enable=False), dynamic_context_parallel=False, use_fused_kernels=False,
        use_megatron_fsdp=False,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(model if hasattr(model, name) else engine, name, value)
    return model, engine


@pytest.mark.parametrize(
    ("trimtab", "options"),
    [
        (None, PluginOptions("plan", "auto")),
        ({}, PluginOptions("plan", "auto")),
        ({"mode": "shadow", "slots_per_rank": 3}, PluginOptions("shadow", 3)),
    ],
)
def test_options_are_in_the_actor_s_config(trimtab: Any, options: PluginOptions) -> None:
    config = {} if trimtab is None else {"trimtab": trimtab, "moe_config": {}}
    with imported() as plugin:
        _, engine = configs(override_mcore_model_config=config)
        assert plugin.read_options(engine) == options
        with mock.patch.dict(os.environ, {BALANCE: "mode=off"}):
            assert plugin.read_options(engine) == PluginOptions("off")


@pytest.mark.parametrize(
    ("trimtab", "message"),
    [
        ({"moves": True}, "has moves or mode=rehome: .* renumber the checkpoint"),
        ({"mode": "static"}, "has mode=static; it should be one of plan, "),
        ({"mode": False}, "has mode=False; "),
        ({"fill": True}, "has no option 'fill'"),
    ],
)
def test_wrong_options_are_named(trimtab: dict[str, Any], message: str) -> None:
    with imported() as plugin:
        _, engine = configs(override_mcore_model_config={"trimtab": trimtab})
        with pytest.raises(InputError, match=f"^override_mcore_model_config.trimtab {message}"):
            plugin.read_options(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic_context_parallel": True}, "dynamic_context_parallel=True is not supported: "),
        ({"use_fused_kernels": True}, "use_fused_kernels=True is not supported: "),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp=True is not supported: "),
        ({"qat": SimpleNamespace(enable=True)}, "qat.enable=True is not supported: "),
        ({"lora": {"rank": 8}}, "lora.rank=8 is not supported: "),
        ({"mtp": SimpleNamespace(enable=True)}, "mtp.enable=True is not supported: "),
        ({"router_replay": SimpleNamespace(mode="disabled")}, "mode=plan needs recorded routing; .*R3"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with imported() as plugin:
        plugin.check_supported(*configs(), PluginOptions())
        plugin.check_supported(*configs(**changes), PluginOptions("off"))
        with pytest.raises(InputError, match=f"^verl can't be balanced: {message}"):
            plugin.check_supported(*configs(**changes), PluginOptions())
        if "router_replay" in changes:
            plugin.check_supported(*configs(**changes), PluginOptions("live"))
