# The few commands people need. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STACK = $(shell $(PYTHON) -c 'import sys; print("py3%d" % min(max(sys.version_info[1], 11), 13))')
CONSTRAINTS = constraints/$(STACK).txt
# Not --quiet: what pip prints shows that it is at work. pip compiles 11,000 files to byte code one by
# one; BYTE_CODE does so on all cores.
INSTALL = $(BIN)/pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
BYTE_CODE = $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
WORKDIR ?= runs/quickstart
ARGS ?=
# A process a core, four at most: each compiles for itself and holds up to 3 GB.
PARALLEL = -n logical --maxprocesses=4 --dist=worksteal
SCRIPTS = .ci/run $(wildcard scripts/*.sh scripts/*/*.sh scripts/*/*.sbatch)
# The files that hold tests of a mark, unless ARGS names files: to collect all of them takes every
# process 18 s.
files_of = $(if $(filter tests/%,$(ARGS)),,$(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests))

.PHONY: help notebooks quickstart test test-long test-slow test-processes test-trackers test-environments test-sglang test-gpu gpu-day aot check format docs venv sglang-cpu sglang-cuda clean

help:  ## Show this text.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/default  ## Train SmolLM2-135M-Instruct on arithmetic (2 cores, 5 minutes); ARGS="--config.x=y" overrides.
	$(BIN)/python -m grpo_jax.main --config=configs/quickstart.py --workdir=$(WORKDIR) $(ARGS)
	@echo "For the commands above, activate the environment in your shell: source $(BIN)/activate"

# With ARGS also the long ones. CHANGED may be a commit, too.
test: venv  ## Run the tests (no accelerator, no network); CHANGED=1: those of what changed.
	@tests=; if [ -n "$(CHANGED)" ]; then \
	  tests=$$($(BIN)/python scripts/tests_of_changes.py $(filter-out 1,$(CHANGED))) || exit; \
	  [ -n "$$tests" ] || exit 0; echo "Tests of what changed:" $$tests; \
	fi; \
	set -x; $(BIN)/python -m pytest -q $(PARALLEL) -m "$(if $(ARGS),,not long and )not slow and not sglang and not processes" $$tests $(ARGS)

test-long: venv  ## Run the tests that take more than a second each, notebooks with a tiny model among them.
	$(BIN)/python -m pytest -q $(PARALLEL) -m "long and not slow and not sglang and not processes" $(call files_of,long) $(ARGS)

test-slow: venv  ## Run the tests on real components: the real model, killed processes.
	$(BIN)/python -m pytest -q $(PARALLEL) -m "slow and not sglang and not processes" --durations=15 $(call files_of,slow) $(ARGS)

# Two files side by side: a file starts processes and waits for them most of the time.
test-processes: venv  ## Run the tests of runs that consist of several processes.
	$(BIN)/python -m pytest -q -n 2 --dist=loadfile -m processes --durations=15 $(call files_of,processes) $(ARGS)

# Two processes: each server takes up to 3 GB, and a file's tests share their servers.
test-sglang: venv  ## Run the tests with real SGLang servers, on this machine's CPU.
	PYTHON=$(PYTHON) scripts/install_sglang.sh cpu
	$(BIN)/python -m pytest -q -n 2 --dist=loadfile -m sglang --durations=10 $(call files_of,sglang) $(ARGS)

# Two of them need older versions of pillow and protobuf than the rest: an environment on top of .venv.
TRACKERS = .venv-trackers
test-trackers: venv  ## Run the tests with wandb, mlflow, trackio and swanlab, in their offline modes.
	$(BIN)/python -m venv $(TRACKERS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(TRACKERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
	@echo "Installing the trackers into $(TRACKERS), 0.3 GB."
	$(TRACKERS)/bin/pip install --disable-pip-version-check --no-compile --no-deps -r constraints/trackers.txt
	$(TRACKERS)/bin/python -m pytest -q -m trackers tests/packages/grpo_trackers/test_tracker_stores.py $(ARGS)

# Three folders: hydra needs an old antlr, and verifiers 0.4 has no load_environment any more. The
# servers run on Python 3.11, whatever nemo-gym says.
ENVIRONMENTS = .venv-environments
ENVIRONMENTS_PIP = $(ENVIRONMENTS)/bin/pip install --disable-pip-version-check --no-compile --no-deps
test-environments: venv  ## Run the tests with environments of verifiers, NeMo Gym and OpenEnv, and the openai package.
	$(BIN)/python -m venv $(ENVIRONMENTS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(ENVIRONMENTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
	@echo "Installing verifiers, nemo-gym and openenv into $(ENVIRONMENTS), 0.7 GB."
	$(ENVIRONMENTS_PIP) -r constraints/environments.txt
	test -d $(ENVIRONMENTS)/servers/nemo_gym || $(ENVIRONMENTS_PIP) --ignore-requires-python --target $(ENVIRONMENTS)/servers -r constraints/environments_servers.txt
	test -d $(ENVIRONMENTS)/classic/verifiers || $(ENVIRONMENTS_PIP) --target $(ENVIRONMENTS)/classic -r constraints/environments_classic.txt
	$(ENVIRONMENTS)/bin/python -m pytest -q -m environments tests/packages/grpo_environments/test_third_party.py tests/serving/test_openai_package.py $(ARGS)
	PYTHONPATH=$(ENVIRONMENTS)/classic $(ENVIRONMENTS)/bin/python -m pytest -q -m environments tests/packages/grpo_environments/test_third_party.py $(ARGS)

test-gpu: $(VENV)/default  ## Run the tests that need an NVIDIA GPU of the Hopper generation.
	@echo "Installing JAX for CUDA into $(VENV), several GB, unless it is there."
	$(INSTALL) -e ".[test,cuda]"
	$(BYTE_CODE)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest --noconftest -q -W default -m gpu $(call files_of,gpu) $(ARGS)

gpu-day: $(VENV)/default  ## Measure what counts on an NVIDIA GPU, in nine minutes: docs/gpu.md; ARGS="--resume".
	@echo "Installing JAX for CUDA and pytest into $(VENV), several GB, unless they are there."
	$(INSTALL) -e ".[cuda]" pytest
	$(BYTE_CODE)
	$(BIN)/python scripts/gpu_day.py $(ARGS)

aot:  ## Compile kernels and an update for an H100 and for TPUs that are not here: memory, spills. Needs Python 3.12.
	scripts/compile_for_devices.sh

check: venv  ## Format check, lint, types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	@if command -v shellcheck; then shellcheck $(SCRIPTS); else echo "no shellcheck here: scripts are not checked"; fi

format: venv  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: venv  ## Make notebooks/*.ipynb from notebooks/*.py.
	$(BIN)/python scripts/make_notebooks.py

docs: venv  ## Build the documentation site into build/docs; warnings and broken links are errors.
	$(BIN)/python -m sphinx -W --keep-going -n -q -d build/doctrees -b html docs build/docs

venv: $(VENV)/everything  ## Make .venv with everything the default use, the tests and the checks need.

$(VENV)/default: pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) scripts/can_install.py
	@echo "Installing what a run needs into $(VENV): 1.0 GB, a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --only-binary=:all: -e .
	$(BYTE_CODE)
	touch $@

$(VENV)/everything: $(VENV)/default
	@echo "Installing what tests and checks need into $(VENV): 1.6 GB more, a few minutes, once."
	$(INSTALL) -e ".[test,dev]"
	$(BYTE_CODE)
	touch $@

sglang-cpu:  ## Make .venv-sglang, the environment of SGLang servers on a CPU (1.4 GB).
	PYTHON=$(PYTHON) scripts/install_sglang.sh cpu $(ARGS)

sglang-cuda:  ## Make .venv-sglang, the environment of SGLang servers on NVIDIA GPUs (10 GB).
	PYTHON=$(PYTHON) scripts/install_sglang.sh cuda $(ARGS)

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) $(TRACKERS) $(ENVIRONMENTS) .venv-aot-* .pytest_cache .ruff_cache build *.egg-info
