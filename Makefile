# The door to everything. `make demo` and `make test` are all a newcomer needs: each does its own set-up, as often as
# you like. PYTHON names the interpreter the environment is made with (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin
MODEL := $(if $(VTOKEN_MODEL),$(VTOKEN_MODEL),.cache/models/SmolLM2-135M-Instruct)
export VTOKEN_MODEL := $(abspath $(MODEL))
# Tools and engines keep what they write inside the repository: HOME may be missing or read-only.
export MYPY_CACHE_DIR := .cache/mypy
export RUFF_CACHE_DIR := .cache/ruff
export VLLM_CACHE_ROOT := $(CURDIR)/.cache/vllm
export VLLM_CONFIG_ROOT := $(CURDIR)/.cache/vllm
export HF_HOME := $(CURDIR)/.cache/huggingface
# The model is on disk; nothing is asked of, or told to, anybody outside.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export RAY_USAGE_STATS_ENABLED := 0
PICTURES := .cache/screenshots

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-kernels test-gpu test-cluster cluster-tools check prometheus observe test-observe screenshot-tools screenshots lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup:  ## make the virtual environment .venv (about two minutes, then cached)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("vToken needs Python 3.11 or newer, $(PYTHON) is " + v + ": name another with make PYTHON=...")'
	@$(PYTHON) deploy/setup/bootstrap.py $(if $(GPU),--gpu)

# A directory that is not ours (VTOKEN_MODEL) is used as it is.
model: setup
	@if [ -f "$(MODEL)/config.json" ] && [ ! -f "$(MODEL)/vtoken-manifest.json" ]; then echo "using the model in $(MODEL)"; \
	else $(BIN)/vtoken prepare-model --out "$(MODEL)" > /dev/null; fi

demo: model  ## two replicas serve real chat traffic and reclaim memory (KEEP=1 leaves the server up, RECORD=1 keeps the figures)
	@$(BIN)/python -m vtoken.demo $(if $(KEEP),--keep) $(if $(RECORD),--record)

test: model prometheus  ## all tests that need no GPU: unit tests first, then real engines and clusters
	@echo "== unit tests"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not integration and not cluster and not gpu and not kernels"
	@echo "== Triton kernels, interpreted"
	@$(MAKE) --no-print-directory test-kernels
	@echo "== integration tests"
	@$(BIN)/python -m pytest -m "(integration or cluster) and not gpu"

test-kernels: setup  ## the Triton kernels on the CPU, interpreted
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "kernels and not gpu" tests/device

test-gpu: model  ## kernels and engines on an NVIDIA GPU (set up with GPU=1)
	@$(BIN)/python -m pytest -m gpu tests/gpu

test-cluster: setup cluster-tools  ## cluster files, three nodes, autoscaling, and `ray up` with kill and heal in namespaces
	@$(BIN)/python -m pytest tests/cluster

# openssh-server may start a server of its own on a machine with systemd; the tests use none but theirs.
cluster-tools:  ## what the test of `ray up` needs of the system (installed where you are root and apt-get is there)
	@$(PYTHON) tests/cluster/tools.py

check: setup  ## lint, format, types, import contracts, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/vtoken dashboards build --check
	$(BIN)/vtoken bench tables --check

# Debian's package has the server and promtool; its service is not wanted.
prometheus:
	@command -v prometheus > /dev/null && command -v promtool > /dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing Debian's package prometheus" && \
	  apt-get -qq update && RUNLEVEL=1 apt-get -qq install -y --no-install-recommends prometheus > /dev/null 2>&1; \
	} || echo "prometheus is not installed (Debian: apt-get install prometheus): its tests will be skipped"

observe: model prometheus  ## the demo fleet under steady traffic, watched by a Prometheus; says where to look
	@$(BIN)/python -m vtoken.demo.observe

test-observe: setup prometheus  ## boards, alerts, metrics: with a real Prometheus on a fleet of scripted engines
	@$(BIN)/python -m pytest tests/observe

screenshot-tools:
	@for program in prometheus chromium node npm; do command -v $$program > /dev/null || { \
	  echo "$$program is not installed (Debian: apt-get install prometheus chromium nodejs npm)"; exit 1; }; done

# What is drawn, and with what, lies outside dashboards/: Grafana takes every JSON file below it for a board.
screenshots: screenshot-tools model  ## docs/img: the boards under load, drawn by Grafana's components in a browser (no test needs it)
	@rm -rf $(PICTURES)/boards
	@mkdir -p $(PICTURES)
	@cp -Rp deploy/grafana/screenshots/. $(PICTURES)
	@cd $(PICTURES) && { [ node_modules/.package-lock.json -nt package-lock.json ] || \
	  npm ci --ignore-scripts --loglevel=error --cache=$(CURDIR)/.cache/npm; }
	@$(BIN)/python -m vtoken.demo.observe --capture $(PICTURES)/boards
	@cd $(PICTURES) && node render.js boards $(CURDIR)/docs/img

lock:  ## regenerate deploy/setup/constraints-*.txt
	@$(PYTHON) deploy/setup/lock.py

clean:  ## remove the environment, the prepared model and all caches
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
