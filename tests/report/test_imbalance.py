"""Pictures and tables of imbalance have the loads' values; a missing package is named with its extra."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from matplotlib import pyplot

from trimtab import InputError
from trimtab.report.imbalance import KINDS, Imbalance

RATIOS = {"static": [[2.0, 1.0], [1.5, np.nan], [1.0, 1.25]], "planned": [[1.0, 1.0], [1.25, np.nan]]}


def made() -> Imbalance:
    """Loads of two ranks with these max/mean; the first rank is the busier one."""
    loads = {}
    for name, ratios in RATIOS.items():
        ratio_ML = np.nan_to_num(np.array(ratios))
        busy_ML = (ratio_ML * 20).astype(int)
        loads[name] = np.stack([busy_ML, (ratio_ML > 0) * 40 - busy_ML], axis=-1)
    return Imbalance(loads, np.array([3, 5]), np.array([7, 7, 8])[: len(RATIOS["static"])], 2)


def test_the_table_has_a_row_for_each_instance() -> None:
    imbalance = made()
    table = Imbalance({"static": imbalance.loads["static"]}, imbalance.layer_indices, imbalance.steps, 2).to_pandas()
    assert list(table) == ["plan", "step", "micro_step", "layer", "tokens", "rows", "busiest_rank", "max_over_mean"]
    assert table["step"].tolist() == [7, 7, 7, 7, 8, 8]
    assert table["micro_step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert table["layer"].tolist() == [3, 5] * 3
    assert table["rows"].tolist() == [40, 40, 40, 0, 40, 40]
    assert table["tokens"].tolist() == [20, 20, 20, 0, 20, 20]
    assert set(table["busiest_rank"]) == {0}
    np.testing.assert_array_equal(table["max_over_mean"], np.ravel(RATIOS["static"]))
    both = Imbalance(imbalance.loads, imbalance.layer_indices, 4, 2).to_pandas()
    assert both["plan"].value_counts().to_dict() == {"static": 6, "planned": 4}
    assert set(both["step"]) == {4}
    steps = {"static": np.array([7, 7, 8]), "planned": np.array([1, 2])}
    own = Imbalance(imbalance.loads, imbalance.layer_indices, steps, 2).to_pandas()
    assert own["step"].tolist() == [7, 7, 7, 7, 8, 8, 1, 1, 2, 2]


def test_layers_are_means_over_micro_steps() -> None:
    ax = made().plot("layers")
    static, planned = ax.get_lines()
    np.testing.assert_allclose(static.get_ydata(), [1.5, 1.125])
    np.testing.assert_array_equal(static.get_xdata(), [3, 5])
    np.testing.assert_allclose(planned.get_ydata(), [1.125, 1.0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(RATIOS)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1.0125, 1.95))
    pyplot.close(ax.figure)


def test_a_distribution_rises_to_one() -> None:
    figure, ax = pyplot.subplots()
    assert made().plot("cdf", ax) is ax
    static, planned = ax.get_lines()
    np.testing.assert_allclose(static.get_xdata(), [1.0, 1.0, 1.25, 1.5, 2.0])
    np.testing.assert_allclose(static.get_ydata(), [0.2, 0.4, 0.6, 0.8, 1.0])
    np.testing.assert_allclose(planned.get_xdata(), [1.0, 1.0, 1.25])
    pyplot.close(figure)


def test_a_heatmap_is_of_the_first_plan() -> None:
    ax = made().plot("heatmap")
    np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), np.transpose(RATIOS["static"]))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["3", "5"]
    assert ax.get_legend() is None
    assert ax.images[0].colorbar.ax.get_ylabel()
    pyplot.close(ax.figure)


@pytest.mark.parametrize("kind", KINDS)
def test_axes_have_labels(kind: str) -> None:
    ax = made().plot(kind)
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    pyplot.close(ax.figure)


def test_instances_without_any_load_are_drawn() -> None:
    empty = Imbalance({"static": np.zeros((2, 2, 4), np.int64)}, np.array([0, 1]), 0, 2)
    for kind in KINDS:
        pyplot.close(empty.plot(kind).figure)


@pytest.mark.parametrize(("module", "call"), [("matplotlib", "plot"), ("pandas", "to_pandas")])
def test_a_missing_package_is_named(module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])
    arguments = ("cdf",) if call == "plot" else ()
    with pytest.raises(
        InputError, match=rf"^{module} is not installed; pip install '\.\[plot\]' in Trimtab's checkout$"
    ):
        getattr(made(), call)(*arguments)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"^kind: invalid choice: 'pie' \(choose from layers, heatmap, cdf\)$"):
        made().plot("pie")


class _Missing:
    """A finder of modules that does not find a package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)
