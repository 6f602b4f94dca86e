"""Clusters in TOML: the presets, the strict reader, and the writer."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.site.reference_pages import models_page
from trimtab import ClusterSpec, InputError
from trimtab.cluster import load_cluster, write_cluster
from trimtab.cluster.presets import preset_names, read_preset

PRESETS = ["a100x8", "b200x8", "gb200-nvl72", "h100x8", "h200x8", "h20x8", "h800x8", "local-cpu", "mi300x8"]
GPU_PRESETS = [name for name in PRESETS if name != "local-cpu"]
FIGURES = [f.name for f in fields(ClusterSpec) if f.name not in ("ranks", "slots_per_rank", "mirror_experts", "name")]
SOURCES = dict.fromkeys(FIGURES, "measured")


def preset_text(name: str) -> str:
    text = read_preset("cluster", name)
    assert text is not None
    return text


def test_every_figure_of_a_preset_has_a_source() -> None:
    assert preset_names("cluster") == PRESETS
    assert load_cluster("h100x8", ranks=16) == ClusterSpec(16, 8)
    for name in PRESETS:
        assert load_cluster(name, ranks=32, slots_per_rank=3).name == name
        content = tomllib.loads(preset_text(name))
        assert set(content) == {"format", "name", *FIGURES}
        for figure in FIGURES:
            assert len(content[figure]["source"]) > 6


# GB of each GPU, peak of its bf16 products without sparsity (TFLOP/s), and peak of its memory (TB/s), as its vendor
# states them; both ways together, GB/s of all its links inside the node.
PEAKS = {
    "a100x8": (80, 312, 2.04, 600), "b200x8": (180, 2250, 7.7, 1800), "gb200-nvl72": (186, 2500, 8, 1800),
    "h100x8": (80, 989, 3.35, 900), "h200x8": (141, 989, 4.8, 900), "h20x8": (96, 148, 4, 900),
    "h800x8": (80, 989, 3.35, 400), "mi300x8": (192, 1307, 5.3, 896),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_no_rate_of_a_preset_exceeds_its_peak(name: str) -> None:
    memory_gb, peak_tflops, memory_tb_per_s, links_gb_per_s = PEAKS[name]
    spec = load_cluster(name, ranks=8)
    assert spec.device_bytes == memory_gb * 1e9
    assert 0.2 * peak_tflops * 1e12 < spec.expert_flops < spec.dense_flops < 0.85 * peak_tflops * 1e12
    assert 0.2 * peak_tflops * 1e12 < spec.attention_flops < 0.7 * peak_tflops * 1e12
    assert 0.75 * memory_tb_per_s * 1e12 < spec.memory_bytes_per_s < 0.9 * memory_tb_per_s * 1e12
    assert spec.dispatch_node_bytes_per_s < links_gb_per_s / 2 * 1e9
    assert spec.node_bytes_per_s <= links_gb_per_s / 2 * 1e9
    assert spec.dispatch_network_bytes_per_s < spec.network_bytes_per_s < spec.dispatch_node_bytes_per_s
    assert spec.network_bytes_per_s == (25e9 if name == "a100x8" else 50e9)


def test_a_figure_that_was_not_published_says_so() -> None:
    """A derived rate names the figures that it was derived from."""
    for name in GPU_PRESETS:
        content = tomllib.loads(preset_text(name))
        for figure in ("expert_flops", "dense_flops", "memory_bytes_per_s"):
            source = content[figure]["source"]
            assert not source.startswith("derived") or re.search(r"\d", source), (name, figure)


@pytest.mark.parametrize(
    ("name", "ranks", "given_per_node", "per_node"),
    [
        *[("h100x8", *sizes) for sizes in ((64, None, 8), (4, None, 4), (12, 4, 4), (64, 16, 16), (8, 8, 8))],
        *[("gb200-nvl72", *sizes) for sizes in ((8, None, 8), (64, None, 64), (72, None, 72), (144, None, 72))],
    ],
)
def test_ranks_per_node_are_at_most_all_ranks(name: str, ranks: int, given_per_node: int | None, per_node: int) -> None:
    spec = load_cluster(name, ranks=ranks, ranks_per_node=given_per_node)
    assert (spec.ranks, spec.ranks_per_node, spec.nodes) == (ranks, per_node, ranks // per_node)


@pytest.mark.parametrize(
    ("name", "ranks", "per_node", "example"),
    [
        ("gb200-nvl72", 128, None, 64),
        ("gb200-nvl72", 74, None, 37),
        *[("h100x8", *sizes) for sizes in ((12, None, 6), (4, 8, 4), (4, 0, None), (0, None, None))],
    ],
)
def test_ranks_that_fill_no_node_are_refused(name: str, ranks: int, per_node: int | None, example: int | None) -> None:
    with pytest.raises(InputError, match=f"{name}: {ranks} ranks with .* should divide the ranks") as caught:
        load_cluster(name, ranks=ranks, ranks_per_node=per_node)
    if example:
        assert str(caught.value).endswith(f"for example {example}")
        assert load_cluster(name, ranks=ranks, ranks_per_node=example).nodes == ranks // example


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    for text in ("h201x8", str(tmp_path), ""):
        with pytest.raises(InputError, match=", ".join(PRESETS)):
            load_cluster(text, ranks=8)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('format = "trimtab-cluster-1"', "", 'should begin with format = "trimtab-cluster-1"'),
        ("trimtab-cluster-1", "trimtab-cluster-2", "should begin with format"),
        ('name = "h100x8"', "", "name should be"),
        ('name = "h100x8"', "name = 3", "name should be"),
        ("[expert_flops]", "[expert_flop]", "expert_flop is unknown; the figures are ranks_per_node, expert_flops"),
        ("[expert_flops]\nvalue = 4e14\nsource", "[dispatch_s.source]\nvalue", "is unknown|has no source|not a TOML"),
        ("[copy_s]\nvalue = 1e-6", "[copy_s]", "copy_s: value should be a number"),
        ("[copy_s]\nvalue = 1e-6", "[copy_s]\nvalue = '1e-6'", "copy_s: value should be a number"),
        ("[copy_s]\nvalue = 1e-6", "[copy_s]\nvalue = true", "copy_s: value should be a number"),
        ("[copy_s]\nvalue = 1e-6", "[copy_s]\nvalue = 1e-6\nunit = 's'", "copy_s: unit is unknown"),
        ("[copy_s]\nvalue = 1e-6", "[copy_s]\nvalue = 1.0", "copy_s is 1.0; it should be 0 or more seconds, and below"),
        ('value = 1e-6\nsource = "assumed"', "value = 1e-6", "copy_s has no source"),
        ('value = 1e-6\nsource = "assumed"', 'value = 1e-6\nsource = " "', "copy_s has no source"),
        ('value = 1e-6\nsource = "assumed"', "value = 1e-6\nsource = 3", "copy_s has no source"),
        ("value = 128", "value = 128.0", "tile_rows: value should be a whole number from 1"),
        ("value = 128", "value = 0", "tile_rows: value should be a whole number from 1"),
        ("value = 128", "value = 1_048_577", "tile_rows: value should be a whole number from 1 to 1,048,576"),
        ("value = 128", "value = 0x" + "f" * 5000, "tile_rows: value should be a whole number from 1"),
        ("value = 4e14", "value = 400", "expert_flops is 400.0; it should be 1,000,000 or more"),
        ("value = 4e14", "value = nan", "expert_flops is nan"),
        ("value = 4e14", "value = 0x" + "f" * 5000, "expert_flops: value is too large"),
        ("value = 450e9", "value = 900", "node_bytes_per_s is 900.0; it should be 1,000,000 or more, or 0 for none"),
        ("value = 4e14", "value = ", "not a TOML file"),
        ("[expert_flops]", "[expert_flops]\n[expert_flops]", "not a TOML file"),
    ],
)
def test_errors_in_a_cluster_file_are_one_line(old: str, new: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert old in preset_text("h100x8")
    file.write_text(preset_text("h100x8").replace(old, new, 1))
    with pytest.raises(InputError, match=says) as caught:
        load_cluster(file, ranks=8)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_every_figure_is_required(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for figure in set(FIGURES) - {"transfer_tax"}:
        others = re.sub(rf"\[{figure}\]\nvalue.*\nsource.*\n", "", preset_text("a100x8"))
        for end, says in (("", "is missing; it should be a table with value and"), (f"[[{figure}]]\n", "is not a")):
            file.write_text(others + end)
            with pytest.raises(InputError, match=rf"mine\.toml: {figure} {says}"):
                load_cluster(file, ranks=8)


def test_a_file_of_an_earlier_version_has_no_tax(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(r"\[transfer_tax\]\nvalue.*\nsource.*\n", "", preset_text("a100x8")))
    assert load_cluster(file, ranks=8).transfer_tax == ClusterSpec(8, 8).transfer_tax


def test_a_file_with_a_base_needs_only_the_figures_that_differ(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    header = 'format = "trimtab-cluster-1"\nname = "mine"\n'
    file.write_text(f'{header}base = "b200x8"\n[expert_flops]\nvalue = 7e14\nsource = "measured"\n')
    assert load_cluster(file, ranks=16) == replace(load_cluster("b200x8", ranks=16), name="mine", expert_flops=7e14)
    for wrong in ('"b201x8"', "3", '"mine.toml"'):
        file.write_text(f"{header}base = {wrong}\n")
        with pytest.raises(InputError, match=r"mine\.toml: base should be the name of a preset: a100x8, b200x8, "):
            load_cluster(file, ranks=8)


def test_a_written_file_leaves_out_what_the_base_has(tmp_path: Path) -> None:
    file, base = tmp_path / "mine.toml", load_cluster("h200x8", ranks=8)
    mine = replace(base, name="mine", expert_flops=3e14)
    write_cluster(file, mine, {"expert_flops": "measured"}, base="h200x8")
    assert set(tomllib.loads(file.read_text())) == {"format", "name", "base", "expert_flops"}
    assert load_cluster(file, ranks=8) == mine
    # A figure that differs from the base's needs a source.
    with pytest.raises(InputError, match="copy_s has no source"):
        write_cluster(file, replace(mine, copy_s=2e-6), {"expert_flops": "measured"}, base="h200x8")
    with pytest.raises(InputError, match="base should be the name of a preset"):
        write_cluster(file, mine, {"expert_flops": "measured"}, base="h201x8")
    assert load_cluster(file, ranks=8) == mine


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"a = " + b"[" * 50_000, b"\x00"])
def test_files_that_are_not_clusters_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.toml: "):
        load_cluster(tmp_path / "mine.toml", ranks=8)


TOML = preset_text("h100x8")
PIECES = ["\n", "[", "]", '"', "'", "=", ".", "0", "-", "e", "nan", "inf", "value", "source", "#", "true", "\x00", "é"]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A preset with a few spans dropped, doubled or replaced."""
    text = TOML
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        new = draw(st.sampled_from(PIECES) | st.text(max_size=4) | st.just(text[start:end] * 2))
        text = text[:start] + new + text[end:]
    return text.encode("utf-8", "surrogatepass")


@given(content=mutated() | st.binary(max_size=40))
@settings(max_examples=300)
def test_any_file_is_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_bytes(content)
    try:
        spec = load_cluster(file, ranks=4)
    except InputError as error:
        assert str(error).startswith(f"{file}: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert spec.expert_flops > 0


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    rates = st.floats(1e6, 1e300)
    seconds = st.floats(0, 1, exclude_max=True)
    ratios = st.floats(1e-300, 1e300)
    counts = st.integers(1, 1 << 20) | st.just(1_000_000)
    strategy_by_suffix: dict[str, st.SearchStrategy[Any]] = {
        "_flops": rates, "bytes_per_s": rates, "_bytes": rates, "_s": seconds, "_backward": ratios,
        "_forwards": st.booleans(), "_rows": counts, "_threads": counts, "_per_node": counts, "_tax": st.floats(0, 1),
    }  # fmt: skip
    values = {
        name: draw(next(strategy for suffix, strategy in strategy_by_suffix.items() if name.endswith(suffix)))
        for name in FIGURES
    }
    no_network = {"node_bytes_per_s": 0.0, "network_bytes_per_s": 0.0}
    links = draw(st.sampled_from([{}, {"host_bytes_per_s": 0.0}, no_network]))
    return ClusterSpec(values["ranks_per_node"], name=draw(st.text(min_size=1).filter(str.strip)), **(values | links))


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(spec=specs(), sources=st.fixed_dictionaries(dict.fromkeys(FIGURES, words)))
@settings(max_examples=50)
def test_a_written_cluster_is_read_back(
    spec: ClusterSpec, sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        spec.name.encode()
    except UnicodeEncodeError:
        spec = replace(spec, name="name")
    file = tmp_path_factory.getbasetemp() / "written" / "mine.toml"
    write_cluster(file, spec, sources)
    assert load_cluster(file, ranks=spec.ranks) == spec
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    assert {figure: content[figure]["source"] for figure in FIGURES} == sources
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({**SOURCES, "copy_s": " "}, "copy_s has no source"),
        ({key: text for key, text in SOURCES.items() if key != "layer_s"}, "layer_s has no source"),
        ({**SOURCES, "ranks": "counted"}, "ranks has a source but is not a figure"),
    ],
)
def test_nothing_is_written_without_sources(sources: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        write_cluster(tmp_path / "mine.toml", ClusterSpec(8, 8), sources)
    with pytest.raises(InputError, match="no name"):
        write_cluster(tmp_path / "mine.toml", ClusterSpec(8, 8, name=" "), SOURCES)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    write_cluster(file, ClusterSpec(8, 8), SOURCES)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_cluster(file, ClusterSpec(8, 8, name="other"), SOURCES)
    assert load_cluster(file, ranks=8) == ClusterSpec(8, 8)
    assert list(tmp_path.iterdir()) == [file]


def test_the_reference_has_the_figures_and_sources_of_every_preset() -> None:
    text = models_page()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    (names,) = (row for row in rows if [cell.strip(" `") for cell in row[1:]] == PRESETS)
    values = {row[0].strip(" `"): row[1:] for row in rows if len(row) == len(names)}
    for column, name in enumerate(PRESETS):
        content = tomllib.loads(preset_text(name))
        for figure in FIGURES:
            assert json.loads(values[figure][column]) == pytest.approx(content[figure]["value"])
            assert f"| `{figure}` | {content[figure]['source']} |" in text.replace("&lt;", "<").replace("\\|", "|")
