# Every target sets itself up: it makes .venv when there is none, and installs into it again only
# when a pyproject.toml, constraints.txt or this file has changed. Nothing but Python 3.10+, pip and make is needed.
# `make bench` has an environment of its own, .venv-bench, as it also holds the libraries it compares with.

# On Windows: make and the shell of Git (Git Bash), as GitHub's machines have them.
ifeq ($(OS),Windows_NT)
SHELL := bash
PYTHON ?= python
SCRIPTS := Scripts
else
PYTHON ?= python3
SCRIPTS := bin
endif
export PYTHONUTF8 = 1
DEMO ?= latedrop-demo
TEST_ARGS ?=
AUDIT_ARGS ?=
# Processes that share the test files.
WORKERS ?= auto
# How many times as much as the quick suite `make fuzz` tries: 25 take about ten minutes on an idle core, 150 an hour.
# Another FUZZ_SEED tries other models, files and requests.
FUZZ ?= 25
FUZZ_SEED ?= 0
# What `make portable` runs under each of SETTINGS: the folders whose results are rounded numbers.
PORTABLE_ARGS ?= $(addprefix tests/,adapters boxes calibration classes crowd dropout network onnx_files package \
	propagation streams terms test_metrics.py test_ranking.py)
SETTINGS := "" "ATEN_CPU_CAPABILITY=default" "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" \
	"ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE" "OMP_NUM_THREADS=2"
# make bench BENCH=speed BENCH_ARGS="--nets uci_mlp"
BENCH ?= speed
BENCH_ARGS ?=

# Libraries whose models the tests run, and what these import. Alone, without their other requirements: some would
# bring a second torch along, or a torchvision that does not fit a CPU build. Tests skip what is not there.
MODELS := timm transformers lightning pytorch-lightning segmentation-models-pytorch torchmetrics accelerate \
	lightning-utilities psutil tokenizers huggingface-hub regex PyYAML httpx2 httpcore2 anyio h11 idna truststore \
	polars polars-runtime-32 mag-net torchcrepe h5py datasets dill multiprocess xxhash torch-geometric ase
# Ray is tested on Linux.
comma := ,
RAY := $(if $(filter Linux,$(shell uname -s)),$(comma)ray)

VENV := .venv
BIN := $(VENV)/$(SCRIPTS)
PY := $(BIN)/python
PIP_ARGS := -m pip install --disable-pip-version-check -c constraints.txt
# pip says nothing while it unpacks: a dot every five seconds shows that it works.
DOTS := (while sleep 5; do printf .; done) & trap "kill $$!" EXIT;
PIP_INSTALL := $(DOTS) $(PY) $(PIP_ARGS)
PYTEST := $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile
BENCH_VENV := .venv-bench
BENCH_PY := $(BENCH_VENV)/$(SCRIPTS)/python

# Both distributions of this repository: latedrop, and latedrop-crowd in crowd/.
PROJECTS := pyproject.toml crowd/pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test slow portable skips fuzz lint format docs bench dist audit clean
# One pip at a time works on an environment.
.NOTPARALLEL:
# Tests run beside each other, each on one thread unless you say otherwise.
test slow portable fuzz docs: export OMP_NUM_THREADS ?= 1

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## train a small network on real data, calibrate and judge it by commands: DEMO=folder
	mkdir -p "$(DEMO)" && cp examples/noise_model.py "$(DEMO)"
	cd "$(DEMO)" && $(abspath $(BIN))/python noise_model.py
	cd "$(DEMO)" && $(abspath $(BIN))/latedrop calibrate noise_model:Net --weights net.pt --data val.csv --target level \
	  --reference train.csv -o cal.json
	cd "$(DEMO)" && $(abspath $(BIN))/latedrop evaluate noise_model:Net cal.json --weights net.pt --data test.csv \
	  --unit dB --report report.html
	@echo "The report: $(DEMO)/report.html"

test: $(VENV)/.dev  ## run the tests and the docstring examples
	$(PYTEST) -m "not slow" --junitxml=build/test.xml $(TEST_ARGS)

slow: $(VENV)/.dev  ## run the tests that take long: examples, architectures, ONNX files of them
	$(PYTEST) -m slow --junitxml=build/slow.xml $(TEST_ARGS)

portable: $(VENV)/.dev  ## run the numeric tests with other instruction sets and thread counts, for about an hour
	@said=""; failed=0; \
	for setting in $(SETTINGS); do \
		echo "make portable: $${setting:-nothing set}"; \
		if env $$setting $(PYTEST) -q -m "not slow" $(PORTABLE_ARGS); then found=passed; else found=FAILED; failed=1; fi; \
		said="$$said$$found: $${setting:-nothing set}\n"; \
	done; \
	printf "$$said"; exit $$failed

skips:  ## say what the last `make test` and `make slow` left out, and why; fail where .ci/skips.txt does not list it
	$(PY) .ci/skips.py build

fuzz: $(VENV)/.dev  ## try damaged files, odd requests and random models for ten minutes; FUZZ=150 for an hour
	LATEDROP_FUZZ=$(FUZZ) LATEDROP_FUZZ_SEED=$(FUZZ_SEED) $(PY) -m pytest -n 0 -q --durations=10 tests/fuzz $(TEST_ARGS)

lint: $(VENV)/.dev  ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## fix what can be fixed by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## build the documentation site: build/site/index.html
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --write-all \
		-b html -d build/doctrees -c docs/site . build/site

bench: $(BENCH_VENV)/.peers  ## run the benchmarks, side by side with other libraries
	set -e; for name in $(BENCH); do $(BENCH_PY) -m benchmarks.$$name $(BENCH_ARGS); done

dist:  ## build wheels and sdists of latedrop and latedrop-crowd, install each into an empty environment, try them
	$(PYTHON) .ci/dist.py

audit:  ## look for known vulnerabilities of the pinned versions; AUDIT_ARGS=--strict fails on them
	$(PYTHON) .ci/audit.py $(AUDIT_ARGS)

clean:  ## remove environments, caches and build products
	rm -rf $(VENV) $(BENCH_VENV) build dist crowd/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# torch goes in first and alone, at its pinned version: any other one may bring gigabytes of CUDA
# libraries along.
$(VENV)/.torch: constraints.txt
	@echo "Making $(VENV) and installing torch into it: 0.2 GB to download for CPUs, several with CUDA."
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	touch $@

# All installs are editable, so that none hides the working tree from the others.
$(VENV)/.demo: $(VENV)/.torch $(PROJECTS)
	@echo "Installing what the demo needs: about 0.2 GB to download."
	@$(PIP_INSTALL) -e ".[demo]" -e ./crowd
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(PROJECTS) Makefile
	@echo "Installing what tests and checks need: about 0.5 GB to download."
	@$(PIP_INSTALL) -e ".[all,demo,dev$(RAY)]" -e "./crowd[console]"
	@echo "Installing the libraries whose models are tested: about 0.2 GB to download."
	@$(PIP_INSTALL) --no-deps $(MODELS)
	# Off the path: where its operators do not fit this torch, other libraries would fail to import it.
	@$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/torchvision torchvision
	touch $(VENV)/.demo $(VENV)/.docs $@

# The reference imports every module, and so whatever the extras bring.
$(VENV)/.docs: $(VENV)/.torch $(PROJECTS)
	@echo "Installing what the documentation needs: about 0.3 GB to download."
	@$(PIP_INSTALL) -e ".[all,docs]" -e "./crowd[console]"
	touch $@

# Those that are compared with come last and alone: their requirements contradict each other, and bring another torch.
$(BENCH_VENV)/.peers: constraints.txt $(PROJECTS) benchmarks/peers.txt
	test -x $(BENCH_PY) || $(PYTHON) -m venv $(BENCH_VENV)
	@$(DOTS) $(BENCH_PY) $(PIP_ARGS) torch
	@$(DOTS) $(BENCH_PY) $(PIP_ARGS) -e ".[pandas,plots]" -e ./crowd
	@$(DOTS) $(BENCH_PY) $(PIP_ARGS) --no-deps -r benchmarks/peers.txt
	touch $@
