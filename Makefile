# Every command works from a fresh clone with python3 (and its venv module and headers), a C compiler and make.
#
#   make demo      four unlike devices, profiled, planned and trained; the results go to demo-out/
#   make test      lint, then the tests: at most 8 minutes on 2 cores
#   make test-all  lint, then these and the thorough ones, in whose processes no part of torch is left out
#   make test-thorough  the thorough ones alone
#   make test-fast the tests that start no processes and no sanitizers: for the inner loop
#   make test-NAME those of one directory of tests/, as `make test-solver`
#   make test-gpu  the tests of workers, DDP and the profiler, on a CUDA device
#   make lint      formatting, style and types
#   make brute-force  plans of 5,000 small clusters a family against every split (COUNT=5000); spot machines; 12 kinds
#   make bench     the benchmarks, each with its rival in the same run
#   make papers    what the four systems promise, measured against tuned rivals, into bench-out/: 7,500 s of CPU
#   make networks  the four systems on a ResNet, a VGG and a GPT: hours
#   make soak      half an hour of eight workers, here and over a link, killed, stopped, cut off and replaced
#   make kills     whole runs killed and resumed 200 times, which end as one that was not
#   make torture   the store's processes killed and stopped 5,000 times (FAULTS=1000000: half an hour;
#                  FAULTS=17000 TORTURE="--distance 50 --threads 3": a million pushes by threads, 10,000 kills)
#   make ray       runs on a Ray cluster of this machine; installs ray
#   make reference  docs/reference: every public name, command, option, file format and source file
#   make wheels    what a release uploads, into dist/: the sdist, wheels of Linux on x86-64 and aarch64, one without core
#   make test-wheels  installs each wheel of dist/ into a clean environment and trains with it, aarch64 in emulation
#   make test-oldest  planner, formats, store and DDP with the lowest supported version of every dependency
#   make site      README.md, docs/ and the reference as a web site, into build/site
#   make fuzz-input  5,000 hostile input files through the commands, and 200 through the real one
#   make sanitize  the C programs under the address, undefined-behaviour and thread sanitizers (FORKS=10000)
#   make clean     removes what the other commands made

PYTHON ?= python3
FAULTS ?= 5000
COUNT ?= 5000
FORKS ?= 3000
TORTURE ?=
PY := .venv/bin/python
PIP := $(PY) -m pip install -q -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the same modules: what is compiled once is kept.
export PYTHONDONTWRITEBYTECODE :=

CORE := $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/packaging/*) csrc/build_ffi.py setup.py
C_FILES := $(wildcard csrc/*.[ch] csrc/*/*.[ch] tests/c/*.c tests/c/*.h examples/c/*.c)

.PHONY: brute-force demo test test-all test-thorough test-fast test-gpu lint types bench papers networks soak kills ray torture fuzz fuzz-input sanitize reference site wheels test-wheels test-oldest clean
.DELETE_ON_ERROR:

demo: .venv/core
	@$(PY) examples/digits/demo.py

# Three lanes at once, since a test often waits for processes that it started. A lane takes whole files.
LANES ?= 3
# RERUNS=1: a failure is tried once more, and counted as rerun. For machines that others share, as CI's.
RERUNS ?= 0
PYTEST = $(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder --cpu -rfER --ignore=tests/ray
test: lint
	$(PYTEST) -m 'not thorough' --reruns $(RERUNS)

test-all: lint .venv/fine-tune
	$(PYTEST) --real-torch

# What `make test` leaves out of test-all. These live with time limits and killed processes: a failure is tried again.
test-thorough: .venv/dev .venv/fine-tune
	$(PYTEST) --real-torch -m thorough --reruns 2

test-fast: .venv/dev
	$(PY) -m pytest -m 'not slow'

test-%: .venv/dev
	$(PY) -m pytest tests/$*

test-gpu: .venv/dev
	$(PY) -m pytest tests/worker/test_on_gpu.py tests/torch/test_ddp_on_gpu.py tests/profiler
	PYPS_TEST_DEVICE=cuda $(PY) -m pytest tests/worker tests/torch

lint: .venv/dev types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(C_FILES)

types: .venv/dev
	.venv/bin/mypy -p pyps

# Plans against every split of small clusters, against runs on spot machines, and of many unlike machines.
brute-force: .venv/bench
	$(PY) benchmarks/brute_force.py --count $(COUNT)
	$(PY) benchmarks/spot.py
	$(PY) benchmarks/large_jobs.py

bench: .venv/bench
	$(PY) benchmarks/core.py --save
	$(PY) benchmarks/threads.py --save
	$(PY) benchmarks/master.py --save
	$(PY) benchmarks/look.py --save
	$(PY) benchmarks/bus.py --save
	$(PY) benchmarks/small_steps.py --save
	$(PY) benchmarks/pages.py --save
	$(PY) benchmarks/peers.py --save
	$(PY) benchmarks/pulls.py --save
	$(PY) benchmarks/remote.py --save
	$(PY) benchmarks/shards.py --save
	$(PY) benchmarks/solver.py --save
	$(PY) benchmarks/ddp.py --save
	$(PY) benchmarks/foreign.py --save
	$(PY) benchmarks/fsdp.py --save
	$(PY) benchmarks/sharding.py --save
	$(PY) benchmarks/adaptive.py --save
	$(PY) benchmarks/simulate.py --full --save
	$(PY) benchmarks/learning_rate.py --save
	$(PY) benchmarks/learning_rate.py --workers 32 --save
	$(PY) benchmarks/learning_rate.py --counts --save
	$(PY) benchmarks/lookahead.py --save
	$(PY) benchmarks/pipelined.py --save
	$(PY) benchmarks/checkpoint.py --save
	$(PY) benchmarks/modes.py --save
	$(PY) benchmarks/data.py --save
	$(PY) benchmarks/prediction.py --save
	$(PY) benchmarks/prediction.py --short --save
	$(PY) benchmarks/outside/measured.py --save
	$(PY) benchmarks/outside/generated.py --save
	$(PY) benchmarks/outside/unlike_lengths.py --save
	$(PY) benchmarks/which.py --save
	$(PY) benchmarks/regret.py --save

papers: .venv/dev
	$(PY) benchmarks/papers/papers.py --save
	$(PY) benchmarks/papers/turns.py --save
	$(PY) benchmarks/papers/gaps.py --save
	$(PY) benchmarks/noise.py --save
	$(PY) benchmarks/noise.py --condition 30 --save

networks: .venv/dev
	$(PY) benchmarks/networks.py --save
	$(PY) benchmarks/networks.py --real --save

bench-gpu: .venv/bench
	$(PY) benchmarks/gpu_profile.py --save
	$(PY) benchmarks/gpu_ddp.py --save
	$(PY) benchmarks/gpu_exchange.py --save
	$(PY) benchmarks/gpu_sharding.py --save
	$(PY) benchmarks/ddp.py mean --device cuda --save

bench-local: .venv/dev
	$(PY) benchmarks/local_steps.py --save
	$(PY) benchmarks/local_samples.py --save
	$(PY) benchmarks/local_link.py --save
	$(PY) benchmarks/local_link.py --mbit 8 --save

bench-internet: .venv/dev
	$(PY) benchmarks/internet.py --save
	$(PY) benchmarks/internet.py --loss --save
	$(PY) benchmarks/internet_server.py --save

bench-peers: .venv/bench
	$(PY) benchmarks/peers/run.py --save
	$(PY) benchmarks/adaptive.py --adaptdl --save
	$(PY) benchmarks/long_run.py --minutes 24 --width 96 --layers 2 --sample-seconds 0.1 --save

.venv/bench: .venv/dev
	$(PIP) -e '.[bench]'
	@touch $@

soak: .venv/dev
	$(PY) tests/helpers/soak.py

kills: .venv/dev
	$(PY) tests/helpers/kill_and_resume.py --kills 200

ray: .venv/dev
	$(PIP) ray
	$(PY) -m pytest tests/ray

torture: .venv/dev
	$(PY) tests/c/torture.py --faults $(FAULTS) --lanes 6 $(TORTURE)

fuzz:
	$(PYTHON) tests/c/libfuzzer.py attach
	$(PYTHON) tests/c/libfuzzer.py decode
	$(PYTHON) tests/c/libfuzzer.py journal

fuzz-input: .venv/dev
	$(PY) tests/helpers/input_fuzz.py

sanitize:
	$(PYTHON) tests/c/programs.py address --faults 300 --forks $(FORKS)
	$(PYTHON) tests/c/programs.py thread

reference: .venv/dev
	$(PY) docs/make_reference.py

site: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# UV_TORCH_BACKEND=cpu spares the gigabytes of CUDA that torch 2.4 has on PyPI.
OLDEST := build/oldest/bin/python
OLDEST_TESTS ?= -m "not thorough" tests/solver tests/formats tests/policy tests/worker/test_worker.py \
  tests/worker/test_pipeline.py tests/worker/test_local_state.py tests/worker/test_loader.py tests/run/test_run.py \
  tests/torch/test_accumulate.py tests/torch/test_global_mean.py tests/torch/test_sampler.py tests/torch/test_rebalancer.py \
  --ignore=tests/solver/test_local_steps.py --ignore=tests/solver/test_solver_docs.py -k "not its_loader_processes"
test-oldest:
	$(PYTHON) -m venv build/oldest
	$(OLDEST) -m pip install -q uv
	$(OLDEST) csrc/packaging/install.py --list oldest > build/oldest/required.txt
	$(OLDEST) -m uv pip install -q --python $(OLDEST) --resolution lowest-direct -r build/oldest/required.txt
	$(OLDEST) -m pip install -q --no-deps --no-build-isolation -e .
	$(OLDEST) -m pytest $(OLDEST_TESTS)

wheels: .venv/wheels
	$(PY) csrc/packaging/wheels.py dist

test-wheels: wheels
	$(PY) tests/helpers/try_wheels.py dist

.venv/wheels: .venv/core
	$(PIP) -e '.[wheels]'
	@touch $@

clean:
	rm -rf .venv build dist demo-out bench-out papers-out *.egg-info pyps/_native.c pyps/_native.abi3.so pyps/lib pyps/include
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, once for each change of what it is made from. constraints.txt pins torch: left to the resolver, a
# newer one could come, and with it gigabytes of CUDA.
INSTALL := $(PY) csrc/packaging/install.py
.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON); pyps needs Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old; pyps needs Python 3.11 or newer (make PYTHON=...)" >&2; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "make: $(PYTHON) has no Python.h, which the C core needs; Debian has it in python3-dev" >&2; exit 2; }
	@echo "installing torch and the solvers into .venv, once: about a minute"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) demo
	@touch $@

# PEFT and TRL, of which only thorough tests know.
.venv/fine-tune: .venv/dev
	@$(INSTALL) fine-tune
	@touch $@

# The C core again when it changed.
.venv/core: .venv/installed $(CORE)
	@echo "compiling the C core"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# What tests, lint and documentation need as well.
.venv/dev: .venv/installed | .venv/core
	@echo "installing what the tests need, once: linters, trainers, documentation tools; two minutes"
	@$(INSTALL) dev
	@touch $@
