"""Compile the kernels of all commands for any processor of this kind, into src/trimtab/compiled/.

    python packaging/compile_kernels.py

In an environment with Trimtab's dependencies; `make wheel` does so for each Python. The file is named after this
version of Python and holds the code of one version of numba. A wheel that is built afterwards has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRIMTAB = [sys.executable, "-m", "trimtab"]
RANKS = "--ranks 8"
# Ids of 8 and of 16 bits, with and without groups of experts, one step and several.
TRACES = {
    "math": "qwen3-30b-math --steps 3",
    "large": "qwen3-30b-mixed --experts 512 --top-k 10 --steps 2",
    "grouped": "qwen3.5-35b-text --experts 256 --steps 2",
}
SIZES = "--sequences 32 --mean-length 64 --max-length 128 --layers 2"
OF_TRACES = (
    "trace info {trace}",
    f"analyze {{trace}} {RANKS} --html {{folder}}/analysis.html",
    f"analyze {{trace}} {RANKS} --compare {{trace}}",
    f"plan {{trace}} {RANKS} --ranks-per-node 4",
    f"simulate {{trace}} {RANKS} --ranks-per-node 4 --policy all --dispatcher tokens rows --html {{folder}}/step.html",
    f"advise {{trace}} {RANKS} --ranks-per-node 4 --step-tokens 64K --html {{folder}}/advice.html",
    "rollout {trace} --gpus 16",
    f"trace export {{trace}} --to sglang-placement {RANKS} -o {{folder}}/placement.json",
    "trace export {trace} --to megatron -o {folder}/routes.jsonl",
    "trace import {folder}/routes.jsonl -o {folder}/again.parquet --num-experts 512",
)
ONCE = (
    "analyze {sample} --ranks 8",
    "advise {sample} --ranks 8 --step-tokens 500K --recompute-granularity full",
    "simulate {sample} --ranks 8 --step-tokens 500K --recompute-granularity full --pp 2 --groups 2",
    "simulate {math} --ranks 8 --model qwen3-30b-a3b --mini-batches 2 --equal-terms --policy all",
    "simulate {grouped} --ranks 16 --model deepseek-v3 --policy all",
)


def main() -> None:
    sample = ROOT / "examples" / "sample.parquet"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {"folder": folder, "sample": sample} | {trace: folder / f"{trace}.parquet" for trace in TRACES}
        kernels = folder / "cache" / "trimtab-kernels"
        environment = os.environ | {"NUMBA_CACHE_DIR": str(kernels.parent), "PYTHONPATH": str(ROOT / "src")}
        lines = [f"trace synth {text} {SIZES} -o {places[trace]}" for trace, text in TRACES.items()]
        lines += [line.format(trace=places[trace], **places) for trace in TRACES for line in OF_TRACES]
        for line in [*lines, *(line.format(**places) for line in ONCE)]:
            print("trimtab", line, flush=True)
            subprocess.run([*TRIMTAB, *line.split()], env=environment, check=True, stdout=subprocess.DEVNULL)
        target = ROOT / "src" / "trimtab" / "compiled" / f"{sys.implementation.cache_tag}.zip"
        target.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
            for file in sorted(kernels.iterdir()):
                archive.write(file, file.name)
        print(f"{target.relative_to(ROOT)}: {len(archive.namelist())} kernels, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
