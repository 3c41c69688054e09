# make train   a language model on this machine, in four processes
# make test    the suite; it says how long that takes
# make test-all  the suite, and tests that take longer than one waits for before each commit
# make lint    ruff, mypy and the layering test
# make docs    the pages of docs/, as HTML in build/docs
# make gpu     on a machine with a GPU: the tests that need one, and the ladder of options
#              (GPU_PYTHON=python3 takes that interpreter, OUTPUT=FOLDER is where the tables go)
#
# TORCH=2.12.0 installs another torch, PYTHON=python3.12 uses another interpreter, and PIP_ARGS goes
# to pip: on Linux without a GPU, `PIP_ARGS='--extra-index-url <index of CPU builds>'` saves the
# download of the CUDA libraries.

PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
PIP_ARGS ?=
BIN := .venv/bin

.PHONY: train test test-all lint docs gpu clean

train: .venv/train-$(TORCH)
	$(BIN)/lightning-megatron fit --config recipes/quickstart.yaml

# Three processes on two cores: a third of the time a test waits, for a limit or for another process.
# In the order of the files, long ones that mostly wait do not come last.
test: .venv/dev-$(TORCH)
	@echo 'The suite takes 11 to 16 minutes on two cores. One file: $(BIN)/python -m pytest -q FILE'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m thorough --timeout 600 tests

lint: .venv/dev-$(TORCH)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

# A warning is an error. Without -E a second call writes what has changed alone.
docs: .venv/dev-$(TORCH)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs

# All run, whatever the others find: such machines may be lent for an hour, a call for minutes. A
# machine's own Python is taken where it can run them: it may have no way to a registry. They need
# neither the command line's packages nor those of the linters.
GPU_PYTHON ?=
OUTPUT ?= benchmarks/results
GPU_NEEDS := import hypothesis, lightning, pytest, pytest_timeout, torch; torch.zeros(1).cuda()

gpu:
	@python='$(GPU_PYTHON)'; failed=0; \
	if test -z "$$python" && test ! -e .venv/dev-$(TORCH) \
		&& $(PYTHON) -c '$(GPU_NEEDS)' 2>/dev/null; then python='$(PYTHON)'; fi; \
	if test -z "$$python"; then \
		$(MAKE) --no-print-directory .venv/dev-$(TORCH) && python=$(BIN)/python || exit; fi; \
	echo "with $$python"; \
	$$python -m pytest -q -p no:cacheprovider -m gpu tests/gpu || failed=1; \
	for model in 1b 8b; do \
		$$python -m benchmarks.ladder --model $$model --output '$(OUTPUT)' || failed=1; done; \
	exit $$failed

# One file per torch and set of extras says that they are installed.
# litdata asks for torchvision, whose ordinary wheel does not load beside a CPU build of torch.
.venv/train-$(TORCH): EXTRAS = monitor
.venv/dev-$(TORCH): EXTRAS = dev
.venv/train-$(TORCH) .venv/dev-$(TORCH): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet -c .venv/constraints.txt $(PIP_ARGS) -e '.[$(EXTRAS)]'
	$(if $(filter dev,$(EXTRAS)),$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps litdata==0.2.76)
	rm -f $(filter-out %-$(TORCH),$(wildcard .venv/train-* .venv/dev-*))
	touch $@

clean:
	rm -rf .venv runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
