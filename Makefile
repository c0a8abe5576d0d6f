# The same verbs for people and for CI. Each target creates or refreshes .venv by itself.
#
#   make install   environment in .venv (EXTRAS=dev,parity to add extras)
#   make demo      the main job on an embedded fleet, with a table at the end
#   make test      unit, property and contract tests
#   make check     format, lint, types, import contracts, tests: what CI runs
#   make parity    the model families against transformers, in .venv-parity
#   make e2e       real processes, one of them killed
#   make bench     decision, prefix index, decode step, bucket plans: ratios, not verdicts
#   make device-check  kernels and prefill on this machine's GPU or TPU (EXTRAS=dev,gpu or dev,tpu)
#   make format    rewrite files in house style
PYTHON ?= python3.11
VENV ?= .venv
EXTRAS ?= dev
JOBS ?= 2
BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PACKAGES := kernels eldr_jax bucket_planner calibration serving
export JAX_PLATFORMS ?= cpu

.PHONY: install demo test check check-matrix format lint types imports e2e parity bench device-check clean
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m serving.demo_main --out=out/demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not e2e and not parity"

check: $(STAMP) lint types imports test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Torch and transformers stay out of the environment the product is tested in.
parity:
	$(MAKE) install VENV=.venv-parity EXTRAS=dev,parity
	.venv-parity/bin/python -m pytest -q -m parity tests/parity

e2e: $(STAMP)
	$(BIN)/python -m pytest -q -m e2e tests

TRACES := $(wildcard ../shared/data/traces/azure_llm_2023/*.csv ../shared/data/traces/mooncake_fast25/*.jsonl)

bench: $(STAMP)
	$(BIN)/python -m serving.bench_main
	$(BIN)/python -m calibration.bench_main --suite=index
	$(BIN)/python -m calibration.bench_main --suite=decode_step
	$(if $(TRACES),$(BIN)/python -m bucket_planner.bench_main $(addprefix --trace=,$(TRACES)),@echo "bucket plans skipped: no traces in ../shared/data/traces")

# The platform is JAX's own choice here: the exported default would hide the device.
device-check: $(STAMP)
	env -u JAX_PLATFORMS $(BIN)/python -m eldr_jax.device_check_main --out=out/device_check.json

# The same gate on a newer Python (and with it jax 0.11), in an environment of its own.
check-matrix:
	$(MAKE) check PYTHON=python3.12 VENV=.venv-3.12

clean:
	rm -rf $(VENV) .venv-3.12 .venv-parity out .pytest_cache .ruff_cache .import_linter_cache .hypothesis
