# Every target works on a fresh clone: it needs make and Python 3.10 or newer, and makes .venv itself.
PYTHON ?= python3
VENV ?= .venv
INSTALLED ?= $(VENV)/.installed
BIN := $(VENV)/bin
URL ?=
PYTEST_ARGS ?=
# For test-gpu and bench-gpu: cuda, xpu, ...; empty for the accelerator of this machine.
DEVICE ?=
# Of the machine that `make kit` is for.
PYTHON_VERSION ?= 3.12
BENCH_ARGS ?=
# Tests wait for ranks, stores and deadlines about a third of their time: three files fit two cores.
WORKERS ?= 3
CEPH ?= $(CURDIR)/.ceph
ROOMS ?= ckpt/commit ckpt/format ckpt/layout ckpt/loading ckpt/saving
MUTANTS ?= 60
# For versions: --pythons 3.12 --torches newest --checks import engine
VERSIONS_ARGS ?=
# What long tests count; `python docs/guarantee_counts.py FILE` takes it into docs/guarantee_tests.md.
RESULTS ?= build/results.jsonl

SHELL := /bin/bash

# The tests and the demo run several ranks on few cores: more threads per rank only slow them down.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the packages and the tests: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick versions soak test-gpu test-wild test-cluster judges corpus mutants bench bench-gpu kit check format test-ceph examples docs dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        train, kill in the middle of a save, resume, export, look at it (about 3 minutes)"
	@echo "                 make demo URL=s3://bucket/prefix runs it against S3"
	@echo "make test        all tests          make quick   those without processes, servers, long searches"
	@echo "make versions    Python 3.10 to 3.13 with the oldest, the pinned and the newest torch: docs/versioning.md"
	@echo "make soak        full counts        make bench   benchmarks"
	@echo "make test-gpu    the tests of a device, on this machine's; DEVICE=cpu runs them without one"
	@echo "make test-wild   models, optimizers and frameworks of other libraries, against docs/compatibility.md"
	@echo "make test-cluster  jobs on hosts in network namespaces (needs root): links, disks and processes fail"
	@echo "make judges      fsspec's and zarr's own tests and state machines, run over our stores"
	@echo "make corpus      write tests/corpus anew by the packages that people use; a table of what loads"
	@echo "make bench-gpu   time, memory and kernels on a device against torch's; BENCH_ARGS='--width 2048'"
	@echo "make kit         tests and benchmarks of a device for a machine without a network: build/kit"
	@echo "make mutants     mutation testing: a sample of small wrong changes, and those that no test sees"
	@echo "make check       ruff, ruff format, mypy --strict"
	@echo "make test-ceph   the S3 tests against a real Ceph RADOS gateway (installs Debian packages)"
	@echo "make examples    run examples/      make format  rewrite files as ruff format wants them"
	@echo "make docs        the documents as a site in build/site"
	@echo "make dist        sdist and wheel in dist/, tried in an empty environment"
	@echo "PYTHON=python3.12 make test         choose the interpreter"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; $(PYTHON) is `$(PYTHON) -V`. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fast,encode,huggingface,lightning,data,metrics,orbax,docs]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo $(if $(URL),--url $(URL))

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

quick: $(INSTALLED)
	$(BIN)/python -m pytest -m "not ranks and not server and not long" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# Many gigabytes: an environment for each Python and torch. LIBRARIES names a folder with CUDA's.
versions:
	$(PYTHON) -m tests.on_versions $(VERSIONS_ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m pytest --soak --results $(RESULTS) --timeout=7200 -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu $(if $(DEVICE),--device $(DEVICE)) $(PYTEST_ARGS)

# The libraries are large, and nothing else needs them.
test-wild: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[wild]'
	$(BIN)/python -m pytest --soak --timeout=7200 tests/wild $(PYTEST_ARGS)

# Tests that others wrote to test such things as ours.
judges: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[judges]'
	$(BIN)/python -m pytest --judges -m judges -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)
	$(BIN)/python -m venv --clear build/frameworks
	build/frameworks/bin/python -m pip install --quiet -e . accelerate lightning torchdata transformers trl \
		torchtitan triton 'ray[train]' pytest pytest-timeout pytest-xdist hypothesis
	build/frameworks/bin/python -m pytest --judges -m judges tests/judges/test_examples.py $(PYTEST_ARGS)

# Checkpoints of the packages that people use, by these packages themselves, in environments of their own.
corpus: $(INSTALLED)
	$(BIN)/python -m venv --clear build/corpus
	build/corpus/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		torch safetensors deepspeed==0.19.8 accelerate lightning transformers megatron-core==0.16.1 \
		peft compressed-tensors==0.20.0 torch-checkpointing==0.1.1 orbax-checkpoint==0.12.8 tensorstore
	OMP_NUM_THREADS=1 build/corpus/bin/python tests/corpus/write.py
	# The settings of a machine's pip may have a newest torch.
	for torch in 2.6.0 2.15.0; do \
		$(BIN)/python -m venv --clear build/corpus-$$torch || exit 1; \
		install="build/corpus-$$torch/bin/python -m pip install --quiet torch==$$torch numpy safetensors timm"; \
		$$install || PIP_CONFIG_FILE=/dev/null $$install || exit 1; \
		OMP_NUM_THREADS=1 build/corpus-$$torch/bin/python tests/corpus/write.py $$torch || exit 1; \
	done
	$(BIN)/python -m tests.corpus.table $(PYTEST_ARGS)

test-cluster: $(INSTALLED)
	$(BIN)/python -m pytest --cluster --results $(RESULTS) -s tests/cluster tests/model/test_power.py $(PYTEST_ARGS)

kit: $(INSTALLED)
	$(BIN)/python -m tests.gpu.kit.build build/kit --python $(PYTHON_VERSION)

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutation $(ROOMS) --count $(MUTANTS)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.on_device $(if $(DEVICE),--device $(DEVICE)) $(BENCH_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-ceph: $(INSTALLED)
	trap 'tests/ceph/up.sh --down $(CEPH)' EXIT; \
	  endpoint=`tests/ceph/up.sh $(CEPH) | tail -n 1` && \
	  $(BIN)/python -m pytest -m ceph --ceph "$$endpoint" $(PYTEST_ARGS)

examples: $(INSTALLED)
	$(BIN)/python -m examples.run_all

docs: $(INSTALLED)
	$(BIN)/mkdocs build --quiet --strict

dist: $(INSTALLED)
	.ci/package $(BIN)/python

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info demo-out
