# `make demo` and `make test` do everything on a fresh machine; each target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
RIVALS := $(VENV)/rivals-installed
ADAPTERS := $(VENV)/adapters-installed
RELEASE := $(VENV)/release-installed
DOCS := $(VENV)/docs-installed
export OMP_NUM_THREADS ?= 1
TWO_WORKERS := -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: demo test test-slow test-torch test-faults test-page fuzz mutants lint format docs release-check \
	bench bench-quick bench-timeline bench-page bench-own-cost bench-quality bench-v-major bench-coding \
	bench-recognize bench-tapa bench-pins bench-shard clean

demo: $(STAMP)
	$(BIN)/cocodiff demo

test: lint
	$(BIN)/python -m pytest -m "not slow" $(TWO_WORKERS) --durations 20

test-slow: $(ADAPTERS) docs
	$(BIN)/python -m pytest -m slow $(TWO_WORKERS) --durations 20

# A cross-section with another torch, in an environment of its own: make test-torch TORCH=2.15.0
TORCH ?= 2.15.0
TORCH_VENV ?= .venv-torch-$(TORCH)
test-torch: $(TORCH_VENV)/installed
	$(TORCH_VENV)/bin/python -m pytest -m "not slow" $(TWO_WORKERS) tests/project/test_compat.py \
		tests/compile tests/graph/test_recognize_ulysses.py tests/graph/test_register_attention.py \
		tests/graph/test_small_models.py tests/values/test_attention_ops.py tests/values/test_chunk_heads.py \
		tests/values/test_chunk_tokens.py tests/values/test_split_tapa_phases.py \
		tests/ranks/test_compiled_ranks.py tests/ranks/test_check.py

$(TORCH_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt $(TORCH_VENV)/bin/pip install --quiet \
		--disable-pip-version-check torch==$(TORCH) --editable '.[dev,diffusers,plots,quality]'
	touch $@

# A thousand random models through every pass, all ranks in one process.
fuzz: $(STAMP)
	MKL_CBWR=AUTO,STRICT $(BIN)/python -m tests.fuzz --count 1000

# Sabotages, one at a time: the tests must notice each.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# What every rank says when one of them goes wrong; part of test-slow.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -s tests/ranks/test_fault_matrix.py

# Pages in a browser; as root it installs Debian's chromium if there is none.
test-page: $(STAMP)
	(command -v chromium && command -v chromedriver) > /dev/null || (apt-get update && \
		apt-get install -y --no-install-recommends chromium chromium-driver)
	$(BIN)/python -m pytest tests/page

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A wheel and an sdist, each tried in an empty environment; what was built stays in dist/.
release-check: $(RELEASE)
	$(BIN)/python -m tests.release_check --keep dist

# The site, into build/docs; a link that leads nowhere fails it. Nothing is read from the network.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore::DeprecationWarning $(BIN)/mkdocs build --strict

# The benchmarks over slow links emulate a cluster: root, and Debian's package iproute2.
bench-quick: $(RIVALS)
	$(BIN)/cocodiff bench --quick --out build/bench-quick

bench: $(RIVALS)
	$(BIN)/cocodiff bench --out build/bench --resume

bench-timeline: $(RIVALS)
	$(BIN)/cocodiff bench --timeline --out build/bench-timeline

# How far lossy exchanges are from the exact run, and what they save.
bench-quality: $(STAMP)
	$(BIN)/cocodiff quality --dtype bf16 --batch 8 \
		--policies paper,int4from8,int3from8,int2from8,adaptive40 --out build/quality

# The same over slow links, timed: whole runs of 20 steps.
bench-v-major: $(STAMP)
	$(BIN)/cocodiff quality --shares 75,90 --dtype bf16 --steps 20 --batch 8 \
		--policies int2from8,int3from8 --out build/v-major

bench-coding: $(STAMP)
	$(BIN)/python -m benchmarks.delta_code

bench-own-cost: $(STAMP)
	$(BIN)/python -m benchmarks.own_cost

bench-recognize: $(STAMP)
	$(BIN)/python -m benchmarks.recognize_ulysses

bench-shard: $(STAMP)
	$(BIN)/python -m benchmarks.shard_tokens

bench-page: $(STAMP)
	$(BIN)/python -m benchmarks.page

bench-pins: $(STAMP)
	$(BIN)/python -m benchmarks.pins

bench-tapa: $(STAMP)
	$(BIN)/python -m benchmarks.split_tapa_phases

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--editable '.[dev,diffusers,plots,quality]'
	touch $@

# Quantisation, LoRA and notebooks; diffusers takes longer to import beside them.
$(ADAPTERS): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--editable '.[adapters,notebook]'
	touch $@

$(RELEASE): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--editable '.[release]'
	touch $@

$(DOCS): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--editable '.[docs]'
	touch $@

# Without their dependencies, which want another torch.
$(RIVALS): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--no-deps cache-dit einops
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info
