# Every target says what it does: `make help`.
PYTHON ?= python3.11
VENV ?= .venv
PORT ?= 8080
# PyTorch's CPU wheels; a bare `torch` from PyPI would bring gigabytes of CUDA.
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
TORCH_VERSION ?= 2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export HIVLP_HOME ?= .hivlp

.DEFAULT_GOAL := help
.PHONY: soak help demo test kills processes builds fuzz memory check format typecheck serve demo-report clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s ':'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A CPU wheel that pip already knows of (a local folder, a mirror), else PyTorch's own index.
$(VENV)/.torch: | $(BIN)/python
	@echo "installing torch $(TORCH_VERSION) for the CPU"
	$(PIP) install --quiet --progress-bar off 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
		|| $(PIP) install --progress-bar off --index-url $(TORCH_INDEX_URL) 'torch==$(TORCH_VERSION)'
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing hivlp with the demo's pictures and towers"
	$(PIP) install --quiet --progress-bar off -e '.[cpu,train,demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	@echo "installing what the checks and tests need"
	$(PIP) install --quiet --progress-bar off -e '.[cpu,train,demo,dev]'
	@touch $@

demo: $(VENV)/.demo ## fit, index and serve the demo on 127.0.0.1 (PORT=8080)
	$(BIN)/hivlp demo --port $(PORT)

test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

memory: $(VENV)/.dev ## 50 swaps between two models: memory stays where it was
	$(BIN)/python -m pytest -n 0 -v tests/integration/test_reported.py -m slow

kills: $(VENV)/.dev ## kill -9 at 50 random moments and before each change of every operation
	HIVLP_KILL_ROUNDS=50 $(BIN)/python -m pytest -n 0 -v tests/faults/test_faults_kills.py

processes: $(VENV)/.dev ## kill serving processes, swap versions 20 times under load, memory of 50 swaps
	$(BIN)/python -m pytest -n 0 -v tests/faults/test_faults_processes.py \
		tests/integration/test_activations_under_load.py

builds: $(VENV)/.dev ## kill services, workers and Redis in the middle of builds
	$(BIN)/python -m pytest -n 0 -v tests/faults/test_faults_builds.py

fuzz: $(VENV)/.dev ## mutated pictures, any text, and schemathesis over every endpoint, for long
	HIVLP_FUZZ_ROUNDS=20000 $(BIN)/python -m pytest -n 2 --timeout 3600 \
		tests/property/test_decoder_fuzz.py tests/property/test_served_fuzz.py

soak: $(VENV)/.dev ## ten minutes of every shape of request at the demo's index, and what memory does
	$(BIN)/python bench/soak.py --home $(HIVLP_HOME) --seconds 600

check: $(VENV)/.dev ## lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m hivlp.service.openapi --check docs/openapi.json

format: $(VENV)/.dev ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve: $(VENV)/.demo ## serve what is built
	$(BIN)/hivlp serve --port $(PORT)

demo-report: $(VENV)/.demo ## measure the demo: cross-validated recall, K1 against N
	$(BIN)/python bench/demo_report.py

clean: ## remove the environment and everything made
	rm -rf $(VENV) .hivlp build dist *.egg-info
