"""Every format is imported as the same routing, and thousands of damaged files are refused or read whole."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import signal
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from helpers.every_dump import LAYERS, NUM_EXPERTS, TOP_K, Dump, all_dumps, parquet_dump, routes
from helpers.examples import examples
from trimtab import InputError, RoutingTrace, read_trace, write_trace
from trimtab.cli.main import main
from trimtab.cli.trace_import import _import_options
from trimtab.cluster import load_model
from trimtab.trace import ImportOptions
from trimtab.trace.formats import importing
from trimtab.trace.formats.bounded_import import Limits, ProcessLimits
from trimtab.trace.formats.importing import FORMATS, format_of, import_files
from trimtab.trace.formats.normalise import Summary

DUMPS = all_dumps()
KNOWN = ImportOptions(NUM_EXPERTS, LAYERS, TOP_K)
OPTIONS = ["--num-experts", str(NUM_EXPERTS), "--num-layers", str(LAYERS), "--top-k", str(TOP_K)]
DAMAGED = examples(short=2_000, long=20_000)


def as_sets(ids: Any) -> list[Any]:
    return np.sort(ids, axis=-1).tolist()


def test_every_format_has_a_dump_here() -> None:
    assert {dump.form for dump in DUMPS.values()} == set(FORMATS)


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_is_recognised_and_imported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = DUMPS[name]
    file = tmp_path / f"dump{dump.suffix}"
    file.write_bytes(dump.content)
    assert format_of(file) == dump.form
    (tmp_path / "no suffix").write_bytes(dump.content)
    assert format_of(tmp_path / "no suffix") == dump.form
    assert main(["trace", "import", str(file), "-o", str(tmp_path / "trace.parquet"), *OPTIONS]) == 0
    trace = read_trace(tmp_path / "trace.parquet")
    assert (trace.num_experts, trace.layer_indices.tolist()) == (NUM_EXPERTS, [0, 1, 2, 3])
    expected = routes()[: 1 if name == "vllm:npy" else None]
    if name == "sglang-recorder:counts":
        for sequence, each in enumerate(expected):
            for layer in range(LAYERS):
                made = np.bincount(trace.sequence(sequence)[:, layer].ravel(), minlength=NUM_EXPERTS)
                assert made.tolist() == np.bincount(each[:, layer].ravel(), minlength=NUM_EXPERTS).tolist()
    elif name in ("megatron", "sglang-recorder:tokens"):
        # These know tokens, not sequences.
        assert as_sets(trace.expert_ids) == as_sets(np.concatenate(expected))
    else:
        assert [as_sets(trace.sequence(index)) for index in range(trace.num_sequences)] == list(map(as_sets, expected))
    assert "Imported" in capsys.readouterr().out


def test_several_files_of_several_steps_become_one_trace(tmp_path: Path) -> None:
    for step in range(3):
        (tmp_path / f"rollout-{step}.jsonl").write_bytes(DUMPS["vllm:jsonl"].content)
    command = ["trace", "import", str(tmp_path / "rollout-*.jsonl"), "--domain", "maths", "--step", "4"]
    assert main([*command, "-o", str(tmp_path / "trace.parquet"), *OPTIONS]) == 0
    trace = read_trace(tmp_path / "trace.parquet")
    assert as_sets(trace.expert_ids) == as_sets(np.concatenate(routes() * 3))
    assert set(trace.domains) == {"maths"}
    assert set(trace.steps) == {4}


def test_quoted_text_is_short_and_one_line(tmp_path: Path) -> None:
    def records(path: Path, known: ImportOptions) -> Any:
        raise InputError("odd\n\x1b[31m" + "x" * 5000)

    files, form = [tmp_path / "a"], types.SimpleNamespace(read=records)
    with pytest.raises(InputError) as caught:
        next(importing._records(files, form, ImportOptions(), lambda file: None))  # type: ignore[arg-type]
    assert str(caught.value) == f"{files[0]}: odd??[31m{'x' * 491}"


def test_options_override_the_metadata_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(DUMPS["arrays:npz"].content)
    for options, experts in ((ImportOptions(), NUM_EXPERTS), (ImportOptions(200), 200)):
        (part,) = import_files([tmp_path / "a.npz"], "arrays", options, Summary())
        assert part.num_experts == experts


def test_a_model_supplies_facts_that_options_lack(tmp_path: Path) -> None:
    def known(**options: Any) -> ImportOptions:
        return _import_options(argparse.Namespace(step=2, domain="maths", **options))

    config = {"model_type": "deepseek_v3", "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    config |= {"first_k_dense_replace": 1, "hidden_size": 8, "moe_intermediate_size": 8, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = known(model=str(tmp_path / "config.json"))
    assert (found.num_experts, found.num_layers, found.top_k, found.moe_layers) == (16, 4, 2, (1, 2, 3))
    assert (found.step, found.domain) == (2, "maths")
    assert found.model == load_model(str(tmp_path / "config.json")).name != ""
    assert known(model=str(tmp_path / "config.json"), num_layers=5).num_layers == 5
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": None, "first_k_dense_replace": 0}))
    found = known(model=str(tmp_path / "config.json"))
    assert (found.num_experts, found.num_layers, found.moe_layers) == (16, None, None)
    assert known(top_k=3) == ImportOptions(top_k=3, step=2, domain="maths")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file"),
        (["{both}"], "both.json: could be sglang or megatron; say which it is with --format"),
        (["{nothing}"], r"nothing.bin: looks like none of vllm, sglang.*recording of routes turned on"),
        (["{empty}"], "empty.jsonl: an empty file"),
        (["{parquet}"], "a.parquet: a Parquet file; a routing trace needs no import"),
        (["{vllm}"], r"vllm.jsonl: line 1.*: .*largest id: 15\).* --num-experts"),
        (["{vllm}", "--num-experts", "4"], "vllm.jsonl: line 1, .*they should be 0 to 3"),
        (["{vllm}", "--num-experts", "16", "--top-k", "3"], "top-2 routing; it should be top-3"),
        (["{vllm}", "--num-experts", "16", "--model", "qwen3-30b-a3b"], "--num-experts is 16; qwen3-30b-a3b has 128"),
        (["{vllm}", "--model", "qwen3-30b-a3b"], "top-2 routing; it should be top-8"),
        (["{vllm}", "--model", "absent"], "absent"),
        (["{vllm}", "--format", "slime", "--num-experts", "16"], "vllm.jsonl: "),
        (["{sglang}", "--num-experts", "16"], "--num-layers"),
        (["{folder}"], "folder: holds no"),
        (["{vllm}", "{sglang}"], "vllm.jsonl looks like vllm, .*sglang.jsonl like sglang"),
    ],
)
def test_invalid_arguments_give_one_line_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing.bin").write_bytes(b"\x00\x01\x02 nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "both.json").write_text('{"meta_info": 1, "layer": 2, "top_indices": []}')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and so on")
    for form, name in (("vllm", "vllm:jsonl"), ("sglang", "sglang:int32")):
        (tmp_path / f"{form}.jsonl").write_bytes(DUMPS[name].content)
    places = {"nothing": "nothing.bin", "vllm": "vllm.jsonl", "sglang": "sglang.jsonl", "folder": "folder"}
    places |= {"empty": "empty.jsonl", "parquet": "a.parquet", "both": "both.json"}
    paths = {name: str(tmp_path / file) for name, file in places.items()}
    out = tmp_path / "out" / "trace.parquet"
    assert main(["trace", "import", *(each.format(**paths) for each in arguments), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out/*"))


def test_a_dump_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump.jsonl"
    dump.write_bytes(DUMPS["vllm:jsonl"].content)
    (tmp_path / "link.parquet").symlink_to(dump)
    for output in ("dump.jsonl", "link.parquet"):
        assert main(["trace", "import", str(tmp_path), "-o", str(tmp_path / output), *OPTIONS]) == 2
        assert f"{output}: to be read and written" in capsys.readouterr().err
    assert dump.read_bytes() == DUMPS["vllm:jsonl"].content


def damage(rng: random.Random, content: bytes) -> bytes:
    """Cut, flip, fill, move, repeat, or swap numbers for absurd ones, once or more often."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        kind = rng.randrange(8)
        start = rng.randrange(len(data) + 1)
        size = rng.choice([1, 2, 4, 8, 40])
        if kind == 0:
            del data[start:]
        elif kind == 1 and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[start : start + size] = bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF])]) * size
        elif kind == 3:
            del data[start : start + size]
        elif kind == 4:
            data[start:start] = data[max(0, start - size) : start] * rng.choice([1, 50])
        elif kind == 5:
            data[start : start + size] = rng.randbytes(size)
        elif kind == 6:
            numbers = list(re.finditer(rb"\d+", data))
            if numbers:
                place = rng.choice(numbers)
                absurd = [b"-1", b"0", b"999999999999", b"1e308", b"4294967296", b"null", b'"x"', b"[]", b"{}", b"true"]
                data[place.start() : place.end()] = rng.choice(absurd)
        else:
            other = rng.choice(list(DUMPS.values())).content
            data[start:] = other[rng.randrange(len(other)) :]
    return bytes(data)


class _TooLongError(BaseException):
    pass


def _too_long(*_: object) -> NoReturn:
    raise _TooLongError


@pytest.mark.slow
@pytest.mark.longer
def test_damaged_files_are_refused_in_one_line_or_read_whole(tmp_path: Path) -> None:
    """No other error, no hang, no large memory, and nothing left behind."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        refused = pool.submit(import_damaged_files, tmp_path).result()
    assert min(refused.values()) > DAMAGED / 200, refused


def import_damaged_files(tmp_path: Path) -> dict[str, int]:
    """Damages dumps and reads them within the limits of an import. Returns how many of each kind are refused."""
    rng = random.Random(0)
    sources = {**DUMPS, "trimtab": Dump("trimtab", ".parquet", parquet_dump())}
    refused = dict.fromkeys(sources, 0)
    out = tmp_path / "out.parquet"

    def read(name: str, file: Path) -> RoutingTrace:
        if name == "trimtab":
            return read_trace(file)
        # Half of them as the user says, half as the file looks.
        form = sources[name].form if rng.random() < 0.5 else format_of(file)
        parts = import_files([file], form, KNOWN, Summary())
        if rng.random() < 0.8:
            return RoutingTrace.concatenate(list(parts))
        write_trace(parts, out)
        return read_trace(out)

    for name, dump in sources.items():  # Compiles, and loads what is needed.
        (tmp_path / f"whole{dump.suffix}").write_bytes(dump.content)
        read(name, tmp_path / f"whole{dump.suffix}")
    limits = ProcessLimits(Limits())
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGXCPU, _too_long)
    for index in range(DAMAGED):
        name, dump = rng.choice(list(sources.items()))
        file = tmp_path / f"damaged{dump.suffix}"
        content = damage(rng, dump.content)
        file.write_bytes(content)
        out.unlink(missing_ok=True)
        limits.apply(file)
        try:
            read(name, file).check()
        except InputError as error:
            refused[name] += 1
            assert str(file) in str(error), (name, index)
            assert "\n" not in str(error), (name, index)
            assert len(str(error)) < 2000, (name, index)
            assert not out.exists(), (name, index)
        except MemoryError:
            refused[name] += 1
        except (Exception, _TooLongError) as error:
            kept = Path("out") / f"damaged-{index}{dump.suffix}"
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(content)
            raise AssertionError(f"{name}, kept as {kept}") from error
        assert len(list(tmp_path.iterdir())) <= 2 * len(sources) + 2, (name, index)
    return refused
