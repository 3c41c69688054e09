# make train   a language model on this machine, in four processes
# make test    the suite; it says how long that takes
# make durations  where the time of the last `make test` went; KEEP=--keep checks the record in
# make test-all  the suite, and tests that take longer than one waits for before each commit
# make lint    ruff, mypy and the layering test
# make docs    the pages of docs/, as HTML in build/docs
# make gpu     on a machine with a GPU: the tests that need one, and the ladder of options
#              (GPU_PYTHON=python3 takes that interpreter, OUTPUT=FOLDER is where the tables go)
# make newest  the tests of what is private to others, then the suite, with the newest packages that
#              pyproject.toml admits, in .venv-newest: what a next lock would bring
# make lock    the files in locks/ anew: versions of all packages, for each torch, that the targets
#              above install
#
# TORCH=2.12 takes the lock of another torch (for one that has none, it makes it), PYTHON=python3.12
# uses another interpreter, and PIP_ARGS goes to pip: on Linux without a GPU,
# `PIP_ARGS='--extra-index-url <index of CPU builds>'` saves the download of the CUDA libraries.

PYTHON ?= python3
TORCH ?= 2.13
PIP_ARGS ?=
LOCK := $(if $(filter-out newest,$(TORCH)),locks/torch-$(TORCH).txt)
VENV := $(if $(LOCK),.venv,.venv-newest)
BIN := $(VENV)/bin

# The interpreters that tests start read the package's bytecode, some hundred times.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test durations test-all lint docs gpu newest lock clean

install: $(VENV)/dev-$(TORCH)

train: $(VENV)/train-$(TORCH)
	$(BIN)/lightning-megatron fit --config recipes/quickstart.yaml

# Three processes on two cores: a third of the time a test waits, for a limit or for another process.
# In the order of the files, long ones that mostly wait do not come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -o junit_duration_report=total
test: install
	@echo 'The suite takes 10 to 25 minutes on two cores. One file: $(BIN)/python -m pytest -q FILE'
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --junitxml=build/tests.xml

KEEP ?=
durations: install
	test -e build/tests.xml || $(MAKE) --no-print-directory test
	$(BIN)/python -m benchmarks.durations build/tests.xml $(KEEP)

test-all: test
	$(PYTEST) -m thorough --timeout 600 tests --junitxml=build/thorough.xml

lint: $(VENV)/dev-$(TORCH)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

# A warning is an error. Without -E a second call writes what has changed alone.
docs: $(VENV)/dev-$(TORCH)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs

# All run, whatever the others find: such machines may be lent for an hour, a call for minutes. A
# machine's own Python is taken where it can run them: it may have no way to a registry. They need
# neither the command line's packages nor those of the linters.
GPU_PYTHON ?=
OUTPUT ?= benchmarks/results
GPU_NEEDS := import hypothesis, lightning, pytest, pytest_timeout, torch; torch.zeros(1).cuda()

gpu:
	@python='$(GPU_PYTHON)'; failed=0; \
	if test -z "$$python" && test ! -e $(VENV)/dev-$(TORCH) \
		&& $(PYTHON) -c '$(GPU_NEEDS)' 2>/dev/null; then python='$(PYTHON)'; fi; \
	if test -z "$$python"; then \
		$(MAKE) --no-print-directory $(VENV)/dev-$(TORCH) && python=$(BIN)/python || exit; fi; \
	echo "with $$python"; \
	$$python -m pytest -q -p no:cacheprovider -m gpu tests/gpu || failed=1; \
	for model in 1b 8b; do \
		$$python -m benchmarks.ladder --model $$model --output '$(OUTPUT)' || failed=1; done; \
	exit $$failed

# The suite runs in any case. Both fail together where a package has changed.
newest:
	rm -f .venv-newest/dev-newest
	$(MAKE) --no-print-directory .venv-newest/dev-newest TORCH=newest
	@failed=0; \
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -q tests/adoption/test_contract.py \
		tests/_torch tests/_lightning || failed=1; \
	$(MAKE) --no-print-directory test TORCH=newest || failed=1; \
	exit $$failed

# One file per torch and set of extras says that they are installed.
# litdata asks for torchvision, whose ordinary wheel does not load beside a CPU build of torch.
PIP_INSTALL = $(BIN)/python -m pip install --quiet $(PIP_ARGS) \
	$(if $(LOCK),-c $(LOCK),--upgrade --upgrade-strategy eager)
$(VENV)/train-$(TORCH): EXTRAS = monitor
$(VENV)/dev-$(TORCH): EXTRAS = dev
$(VENV)/train-$(TORCH) $(VENV)/dev-$(TORCH): pyproject.toml $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[$(EXTRAS)]'
	$(if $(filter dev,$(EXTRAS)),$(PIP_INSTALL) --no-deps litdata)
	rm -f $(filter-out %-$(TORCH),$(wildcard $(VENV)/train-* $(VENV)/dev-*))
	touch $@

LOCKS := $(wildcard locks/torch-*.txt)
lock:
	rm -f $(LOCKS)
	$(MAKE) --no-print-directory $(LOCKS)

# Of this torch the newest patch, for all Pythons that it and pyproject.toml admit. The libraries of
# CUDA differ between builds of one torch, which names them itself. The resolver has its own
# configuration (UV_DEFAULT_INDEX, UV_INDEX), not that of pip.
locks/torch-%.txt:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	for oldest in 3.10 3.11 3.12; do \
		printf 'litdata\ntorch==%s.*\n' '$*' | $(BIN)/uv pip compile --quiet --universal \
			--python-version $$oldest --extra dev --no-annotate \
			--custom-compile-command 'make lock' pyproject.toml - \
			> $(VENV)/lock.txt 2> $(VENV)/lock.errors && break; done \
		|| { cat $(VENV)/lock.errors; exit 1; }
	sed -E '/^(cuda|nvidia|triton)/d; s/^(torch==[0-9.]+)\+\w+/\1/' $(VENV)/lock.txt > $@

clean:
	rm -rf .venv .venv-newest runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
