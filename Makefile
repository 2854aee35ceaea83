VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
# What is imported is compiled once and kept, whatever the environment says; to compile all that is installed takes longer.
INSTALL := -m pip install --disable-pip-version-check -q --no-compile
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv test test-all demo demo-pipeline lint clean

venv: $(STAMP)

# The exact pin of torch goes in first: it resolves to a CPU build, which the rest then keeps.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python $(INSTALL) "$(TORCH)"
	$(BIN)/python $(INSTALL) -e ".[test,train]"
	touch $@

# The first leaves out what is slow and samples tests of many parameters (see tests/conftest.py), so that it ends in time on any machine.
test: venv
	$(PYTEST) --sample

test-all: venv
	$(PYTEST)

demo: venv
	$(BIN)/python -m benchmarks.demo.demo

demo-pipeline: venv
	$(BIN)/python -m benchmarks.demo.demo --stages 2 --microbatches 4 --steps 60

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
