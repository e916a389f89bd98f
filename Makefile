# make demo   train, fine-tune and sample a small GPT on two processes
# make test   lint, types and tests against the installed wheels
# make soak   random models, pipelines and schedules against eager PyTorch; SOAK_EXAMPLES=1000 for how many
# make isolated   each distribution's tests, where nothing else is installed; PLUGIN="ddp fsdp" for some
#
# All set up .venv first. Variables: PYTHON (3.11 or newer), PYTEST_ARGS, DEMO_ARGS, PLUGIN, SOAK_EXAMPLES.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadfile
SOAK_EXAMPLES ?= 200
BIN := .venv/bin

.DEFAULT_GOAL := test
.PHONY: setup demo test soak isolated lint clean

setup:
	@$(PYTHON) tools/make_venv.py

demo: setup
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# PYTHONSAFEPATH keeps the checkout off sys.path, here and in the processes that the tests start, so that the
# installed wheels are tested. Two workers, one file at a time, each with groups of processes: one thread for each.
test: lint
	PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

soak: setup
	PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 SOAK_EXAMPLES=$(SOAK_EXAMPLES) $(BIN)/python -m pytest -n 2 --dist load tests/soak

isolated: setup
	$(BIN)/python tools/isolated.py $(PLUGIN) -- $(PYTEST_ARGS)

clean:
	rm -rf .isolated .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
