.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long nightly test-recipes test-install wheel lock test-megatron test-trl test-verl test-slime test-miles test-skyrl test-ms-swift test-sglang test-afd-plugin test-te test-fsdp-blocks test-ray test-backward-thread mutants reliability lint docs bench clean

PYTHON ?= python3
BIN := .venv/bin
OUT ?= out/demo
# Where it is set, each process compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: .venv/.ready  ## post-train a small MoE on two local ranks, balanced by Trimtab (about 3 minutes)
	$(BIN)/python -m recipes.rl.train -o $(OUT)

# These start ranks.
WIDE := tests/runtime tests/recipes tests/integrations tests/launch tests/calibration tests/doctor tests/test_examples.py

# Files run in processes forked from one that has imported everything: tests/helpers/forked_files.py.
PYTEST := $(BIN)/python -m pytest --forks 4 --ignore=tests/reliability --ignore=tests/gpu

# Those on which mistakes are tried, too: tests/mutants/function_map.py.
OF_CHANGES := not long and not nightly

test: .venv/.ready  ## run the tests (about 15 minutes on 2 cores)
	$(PYTEST) -m '$(OF_CHANGES)'

test-fast: .venv/.ready  ## run the tests that start no ranks, commands or browser (about 90 seconds)
	$(PYTEST) -m '$(OF_CHANGES) and not slow' $(addprefix --ignore=,$(WIDE))

test-long: .venv/.ready  ## run tests with many more random examples and combinations (may take an hour)
	TRIMTAB_TESTS=long $(PYTEST) --hypothesis-profile=nightly -m 'long or longer'

nightly: .venv/.ready  ## what takes too long for every change: more cases, random examples, long tests, verl, installations, mistakes, faults and fuzzing
	$(PYTEST) --hypothesis-profile=nightly -m 'long or nightly or hypothesis'
	$(BIN)/python -m pytest tests/gpu --device cpu
	$(MAKE) test-verl test-te test-fsdp-blocks test-ray test-backward-thread test-install mutants reliability

test-recipes: .venv/.ready  ## run all tests of recipes/ (about 10 minutes); make test has a short run of each
	$(PYTEST) -m 'not long' tests/recipes

test-install: .venv/.ready  ## install the wheel with newest and oldest dependencies on every Python here, run README's commands (about 30 minutes)
	$(PIP_INSTALL) -c constraints.txt uv
	$(BIN)/python tests/installation/run.py

wheel: .venv/.ready  ## build a wheel into dist/, with the kernels of commands compiled for each Python here (about 15 minutes)
	$(PIP_INSTALL) -c constraints.txt uv
	for python in 3.11 3.12 3.13; do \
	  $(BIN)/python -m uv python find --no-python-downloads $$python || continue; \
	  $(BIN)/python -m uv run --no-project --isolated --python $$python --with-editable . python packaging/compile_kernels.py || exit 1; \
	done
	$(BIN)/python -m uv build --wheel -o dist

lock: .venv/.ready  ## write the hashes of all packages that CI installs, and docs/licences.md, anew
	$(PIP_INSTALL) -c constraints.txt uv
	$(BIN)/python tests/installation/lock.py

# RELEASE=0.19.2 runs them with that release, MEGATRON=path/to/Megatron-LM with the Megatron in that folder. Newer ones import
# triton, and their wheels ask for Python 3.12 and run with 3.11. OPTIONS=FILE runs the options of a user's script or log.
MEGATRON_PATH = $(abspath $(or $(MEGATRON),$(RELEASE:%=out/megatron-%)))
test-megatron: .venv/.ready $(RELEASE:%=out/megatron-%/.ready) $(if $(MEGATRON),out/triton/.ready)  ## run the long form of the Megatron tests (RELEASE=0.19.2 or MEGATRON=folder: with that version; OPTIONS=file: a user's options alone)
	TRIMTAB_TESTS=long PYTHONPATH=$(MEGATRON_PATH:%=%:$(abspath out/triton)) $(BIN)/python -m pytest --forks 2 $(if $(OPTIONS),tests/integrations/test_megatron_options.py -k file,tests/integrations -k megatron)

out/megatron-%/.ready: out/triton/.ready
	$(BIN)/python -m pip download --quiet --no-deps --ignore-requires-python --dest out/wheels megatron-core==$*
	$(BIN)/python -m zipfile -e out/wheels/megatron_core-$*-*.whl out/megatron-$*
	touch $@

out/triton/.ready: .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target out/triton triton
	touch $@

test-trl: .venv/.ready  ## run the tests of the TRL trainer (about a minute)
	$(BIN)/python -m pytest tests/integrations/test_trl.py

test-verl: .venv-verl/.ready  ## run the tests of verl 0.9.1, observed and balanced, in an environment of its own (about 3 minutes)
	PYTHONPATH=src .venv-verl/bin/python -m pytest --forks 2 -k verl tests/observe/test_released_frameworks.py tests/integrations/test_verl.py

# SLIME is a folder with slime's source: git archive 624b824a8 slime | tar x.
test-slime: .venv/.ready  ## run slime's own functions with the plugin (SLIME=folder with its source)
	SLIME=$(SLIME) $(BIN)/python -m pytest -s tests/integrations/test_slime_source.py tests/integrations/test_framework_names.py

# MILES is a folder with miles' source at 31f1ca961, MEGATRON one with its fork of Megatron at 2e64d788b.
test-miles: .venv/.ready  ## run the plugin in miles' Megatron, with its replay manager (MILES=folder MEGATRON=folder)
	MILES=$(MILES) PYTHONPATH=$(MEGATRON) $(BIN)/python -m pytest tests/integrations/test_replay_plugins.py tests/integrations/test_framework_names.py -k miles

# Released packages, without what they import.
test-skyrl: .venv/.ready  ## run the replay of SkyRL's release with the plugin (about a minute)
	$(BIN)/python -m pip download --quiet --no-deps --dest out/wheels skyrl==0.3.0
	$(BIN)/python -m zipfile -e out/wheels/skyrl-0.3.0-py3-none-any.whl out/wheels/skyrl
	SKYRL=out/wheels/skyrl $(BIN)/python -m pytest tests/integrations/test_skyrl.py

test-ms-swift: .venv/.ready  ## run the functions of ms-swift's release with the plugin (about a minute)
	$(BIN)/python -m pip download --quiet --no-deps --dest out/wheels ms-swift==4.6.0
	$(BIN)/python -m zipfile -e out/wheels/ms_swift-4.6.0-py3-none-any.whl out/wheels/ms_swift
	MS_SWIFT=out/wheels/ms_swift $(BIN)/python -m pytest tests/integrations/test_ms_swift.py tests/integrations/test_framework_names.py

test-sglang: .venv/.ready  ## read a placement with the loader of SGLang's release (about a minute)
	$(BIN)/python -m pip download --quiet --no-deps --dest out/wheels sglang==0.5.23
	$(BIN)/python -m zipfile -e out/wheels/sglang-0.5.23-*.whl out/wheels/sglang
	SGLANG=out/wheels/sglang $(BIN)/python -m pytest tests/planner/test_rollout_placement.py -k sglangs

# AFD_PLUGIN is a folder with vllm-project/afd-plugin at 2e4378f2.
test-afd-plugin: .venv/.ready  ## check settings of separate ranks with afd-plugin's own reader (AFD_PLUGIN=folder)
	AFD_PLUGIN=$(AFD_PLUGIN) $(BIN)/python -m pytest tests/sizing/test_deployments.py -k plugin

test-ray: .venv/.ready  ## count a large trace by tasks of Ray on this machine (about 2 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target out/ray ray==2.60.0
	PYTHONPATH=out/ray $(BIN)/python -m pytest tests/test_ray.py

# PRIME_RL is a folder with the src of prime-rl at 559b4477, if at hand.
test-fsdp-blocks: .venv/.ready  ## run MoE blocks of torchtitan, AReaL, Automodel and prime-rl in a session (PRIME_RL=folder; about 2 minutes)
	$(BIN)/python -m pip download --quiet --no-deps --dest out/wheels torchtitan==0.3.0 spmd_types==0.2.3 areal==1.0.4 nemo-automodel==0.7.0
	for name in torchtitan areal nemo_automodel; do $(BIN)/python -m zipfile -e out/wheels/$$name-*.whl out/wheels/$$name; done
	$(BIN)/python -m zipfile -e out/wheels/spmd_types-*.whl out/wheels/torchtitan
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target out/wheels/torchtitan tyro
	test -z "$(PRIME_RL)" || ln -sfn "$(PRIME_RL)" out/wheels/prime_rl
	FSDP_BLOCKS=out/wheels $(BIN)/python -m pytest tests/integrations/test_fsdp_blocks.py tests/integrations/test_prime_rl.py

test-te: .venv/.ready  ## run grouped experts with the Python of Transformer Engine's release, on the CPU (about a minute)
	$(BIN)/python -m pip download --quiet --no-deps --dest out/wheels transformer-engine==2.20.2
	$(BIN)/python -m zipfile -e out/wheels/transformer_engine-2.20.2-py3-none-any.whl out/wheels/transformer_engine
	TRANSFORMER_ENGINE=out/wheels/transformer_engine $(BIN)/python -m pytest tests/integrations/test_megatron_fakes.py -k "grouped or gradients"

# Ways are those of tests/helpers/accelerator.py.
LATE := tests/integrations/test_megatron_equality.py tests/integrations/test_megatron_renumber.py
test-backward-thread: .venv/.ready  ## run tests of ranks, Megatron and live mode with backward on a thread of its own, and on a simulated device that is late (hours)
	AS_ON_GPUS=thread $(PYTEST) -m 'not long' tests/runtime tests/integrations/test_megatron_equality.py
	for ways in "thread late" "thread serial" "thread early" "thread lazy peers queues"; do \
	  AS_ON_GPUS="$$ways" $(PYTEST) -m 'not long' -k 'gradients_are_those or (train_as and not PP and not CP)' $(LATE) || exit 1; done

SEED ?= 1

mutants: .venv/.ready  ## make 200 random mistakes in the source, and count those that no test notices (about 40 minutes; the first time 25 minutes longer)
	$(BIN)/python tests/mutants/run.py --seed $(SEED)

# A file after the other: some fill disks, or stop whole runs.
reliability: .venv/.ready  ## faults of training runs in every mode, soaks, and fuzzing of imports (about 90 minutes)
	$(BIN)/python -m pytest tests/reliability
	$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[fuzz]'
	$(BIN)/python tests/reliability/fuzz_imports.py --seconds 600

lint: .venv/.ready  ## lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs  ## build the site into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/.ready  ## reproduce the figures that README and docs quote (about two hours)
	$(BIN)/python -m benchmarks.runtime --json out/bench-runtime.json
	$(BIN)/python -m benchmarks.planning --json out/bench-planning.json
	$(BIN)/python -m benchmarks.live --json out/bench-live.json
	$(BIN)/python -m benchmarks.t_ppo --json out/bench-tppo.json --picture out/bench-tppo.svg
	$(BIN)/python -m recipes.disaggregated_rollout.benchmark --json out/bench-rollout.json --picture out/bench-rollout.svg
	$(BIN)/python -m benchmarks.bind --json out/bench-bind.json
	$(BIN)/python -m benchmarks.host --json out/bench-host.json
	$(BIN)/python -m benchmarks.megatron --json out/bench-megatron.json
	$(BIN)/python -m benchmarks.planner --json out/bench-planner.json --frontier out/frontier.svg
	$(BIN)/python -m benchmarks.papers --json out/bench-step-time.json
	$(BIN)/python -m benchmarks.step --json out/bench-step.json
	$(BIN)/python -m benchmarks.advice --json out/bench-advice.json
	$(BIN)/python -m benchmarks.traces --json out/bench-traces.json
	$(BIN)/python -m benchmarks.payload --json out/bench-payload.json
	$(MAKE) wheel && $(BIN)/python -m benchmarks.first_answer --wheel dist/*.whl --json out/bench-first-answer.json
	$(BIN)/python -m benchmarks.observe --json out/bench-observe.json
	$(BIN)/python -m benchmarks.capture --json out/bench-capture.json
	$(BIN)/python -m experiments.simulator_validation --json out/bench-simulator.json
	$(BIN)/python -m experiments.papers --json out/bench-papers.json
	$(BIN)/python -m experiments.presets --json out/bench-presets.json

clean:  ## remove what the other targets made
	rm -rf .venv .venv-verl out

# Python compiles modules as they are imported, which are a small part of those that are installed.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
LOCK = .ci/lock-$(shell $(PYTHON) -c 'import platform, sys; print(sys.implementation.cache_tag, sys.platform, platform.machine(), sep="-")').txt

# With hashes where there is a lock for this Python and machine. HASHES=required: nowhere without.
.venv/.ready: pyproject.toml constraints.txt $(wildcard .ci/lock-*.txt)
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) --no-deps --require-hashes -r $(LOCK) || { [ "$(HASHES)" != required ] && \
	  echo "$(LOCK) is missing, or the index has other files: packages are installed without hashes" >&2 && \
	  $(PIP_INSTALL) -c constraints.txt hatchling editables; }
	$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[train,dev]'
	touch $@

.venv/.docs: .venv/.ready
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

# verl asks for versions of its own; what its trainer imports is added to the packages of .venv.
.venv-verl/.ready: .venv/.ready
	$(PYTHON) -m venv .venv-verl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(ls -d .venv-verl/lib/python*/site-packages)/of_trimtab.pth
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 peft mbridge==0.15.1 einops pylatexenc pybind11
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[default]' tensordict torchdata hydra-core codetiming orjson
	touch $@
