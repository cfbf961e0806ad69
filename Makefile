# `make` alone prints what there is. Every target sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Two test processes suit two cores; `make test WORKERS=0` runs everything in one, in order.
WORKERS ?= 2
# Random requests for each route of the gateway; a bare pytest sends a tenth.
FUZZ_CASES ?= 2000
FUZZ := GRISTMILL_FUZZ_CASES=$(FUZZ_CASES)
ARGS ?=
# Rounds of real kills.
ROUNDS ?= 20
# Seeds of the simulator.
SEEDS ?= 1000-1999
# The test cluster's level: node, or control (API server, controllers and scheduler only).
LEVEL ?= node
CLUSTER := $(BIN)/python tests/cluster/cluster.py
CODE := contracts sessions operator worker billing gateway cli recipes benchmarks scripts tests

##@ Start

.PHONY: help
help: ## Print this text
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z][a-z0-9-]*:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make .venv and install the pinned dependencies (a torch that is there is kept)
	@scripts/setup.sh

.PHONY: setup-model
setup-model: ## The same, and the package with the demo model's weights
	@scripts/setup.sh --model

.PHONY: demo
demo: ## Fine-tune a small LLM (SFT, then RL) with the official SageMaker SDK and read its bill
	@scripts/demo.sh

##@ Check

.PHONY: test
test: setup-model ## Every test that needs no cluster (15 to 20 minutes on 2 cores; ARGS goes to pytest)
	@$(FUZZ) $(PYTEST) -n $(WORKERS) -m "not cluster" $(ARGS)

.PHONY: test-fast
test-fast: setup ## Every test but the slow ones and those that start the whole thing
	@$(PYTEST) -n $(WORKERS) -m "not slow and not e2e and not cluster" $(ARGS)

.PHONY: test-gpu
test-gpu: setup ## Where CUDA is: same bits in three runs, parity with the CPU, memory, table of speeds (some minutes)
	@CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTEST) tests/gpu -m gpu $(ARGS)
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/device_table.py

.PHONY: lint
lint: setup ## ruff: rules and format
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

.PHONY: fmt
fmt: setup ## Let ruff mend what it can
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

.PHONY: types
types: setup ## mypy, strict
	@$(BIN)/mypy
	@MYPYPATH=tests/cluster $(BIN)/mypy tests/cluster/*.py tests/support/gristmill_testing/cluster{,_api,_fixtures,_pods}.py

.PHONY: imports
imports: setup ## import-linter: which package may import which
	@$(BIN)/lint-imports

.PHONY: check
check: lint types imports test-fast ## What to run before a commit

##@ Cluster (Linux, root; docs/how-to/run-the-test-cluster.md)

.PHONY: cluster-build
cluster-build: setup ## Build the test cluster: about 10 minutes the first time, then nothing
	@$(CLUSTER) build

.PHONY: cluster-programs
cluster-programs: ## The long part of it, which needs no .venv: Kubernetes and its helpers from source
	@python3 tests/cluster/programs.py

.PHONY: cluster
cluster: cluster-build ## Start a real Kubernetes on this machine (LEVEL=control for one without a node)
	@$(CLUSTER) up --level $(LEVEL)

.PHONY: cluster-down
cluster-down: setup ## Stop it and remove everything
	@$(CLUSTER) down

.PHONY: cluster-status
cluster-status: setup ## What of it runs, and its KUBECONFIG
	@$(CLUSTER) status

.PHONY: test-cluster
test-cluster: setup-model cluster-build ## Every test that needs the cluster (ARGS goes to pytest)
	@PYTHON=$(BIN)/python tests/cluster/run_tests.sh $(ARGS)

##@ Prove

.PHONY: crash-test
crash-test: setup ## ROUNDS of kill -9 on every part and on PostgreSQL, lost answers, cut streams: no token lost or billed twice
	@GRISTMILL_CRASH_ROUNDS=$(ROUNDS) $(PYTEST) tests/meter tests/e2e/test_crash.py tests/e2e/test_crash_rounds.py tests/e2e/test_faults.py $(ARGS)

.PHONY: simulate
simulate: setup ## Seeds of the deterministic simulator (SEEDS=1000-1999; one seed with ARGS=--verbose shows all)
	@PYTHONPATH=tests/support $(BIN)/python -m gristmill_testing.simulation.run --seeds $(SEEDS) --processes $(WORKERS) $(ARGS)

.PHONY: fuzz
fuzz: setup ## Random requests at every route of the gateway: no 5xx, no hang
	@$(FUZZ) $(PYTEST) tests/gateway -k fuzz --hypothesis-profile explore $(ARGS)

.PHONY: bench-engine
bench-engine: setup ## Training, sampling and start against their floors and peers (ARGS="MODEL_FOLDER --rows train decode-8")
	@$(BIN)/python -c "import trl" 2>/dev/null || $(BIN)/pip install -q -c $(VENV)/constraints.txt -e ".[bench]"
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/engine_vs_peft.py $(ARGS)

.PHONY: bench-ranks
bench-ranks: setup ## One process against two ranks, with the whole base and with a part of each layer (ARGS="MODEL_FOLDER")
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/ranks.py $(ARGS)

.PHONY: soak
soak: setup ## 10,000 operations at one worker: does its memory grow, does it get slower (ARGS="--operations 500")
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/soak.py $(ARGS)

.PHONY: bench-overhead
bench-overhead: setup ## What gateway and meter add to an operation
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/overhead.py $(ARGS)

.PHONY: bench-meter
bench-meter: setup ## What the meter costs: operations a second of a core, added latency, memory
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/meter_speed.py $(ARGS)

.PHONY: bench-ledger
bench-ledger: setup ## What the ledger takes, verifies and answers, on SQLite and on PostgreSQL (ARGS="--seconds 5")
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/ledger_ingest.py $(ARGS)
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/usage_query.py
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/usage_query.py --postgres
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/ledger_reserve.py $(ARGS)

.PHONY: bench-operator
bench-operator: cluster-build ## A thousand sessions on a real API server, and one session's start on a real node
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/operator_scale.py $(ARGS)
	@PYTHONPATH=tests/support $(BIN)/python benchmarks/session_start.py

##@ Generate

.PHONY: docs
docs: setup ## Write the generated pages of docs/reference
	@$(BIN)/python scripts/reference.py

.PHONY: crds
crds: setup ## Write the custom resource definitions of crds/ from the contracts
	@$(BIN)/python scripts/crds.py

.PHONY: chart
chart: setup ## Write the chart's schema, its reference page and its copies of crds/
	@$(BIN)/python scripts/chart.py

.PHONY: transcripts
transcripts: setup-model cluster-build ## Write docs/reference/kubectl.md from a run on the test cluster (10 minutes)
	@GRISTMILL_WRITE_TRANSCRIPTS=1 $(PYTEST) tests/node/test_transcripts.py $(ARGS)

.PHONY: constraints
constraints: ## Pin what .venv holds now
	@scripts/constraints.sh

.PHONY: clean
clean: ## Remove caches and the demo's folder; .venv stays
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-data out
