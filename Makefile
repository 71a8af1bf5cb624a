# The entry to every command; people and CI use the same lines. `make` alone lists them.
#
#   make test PYTEST_ARGS="tests/unit -x"     arguments for pytest
#   make run RUN_ARGS="--help"                arguments for the run
#   make setup PYTHON=/path/to/python3.11     a Python that is not on the PATH

.DEFAULT_GOAL := help
.NOTPARALLEL: # of `make -j run test` the second must find what the first has set up
.PHONY: help setup run docs serve gateway up down status doctor test test-slow tools drills mutants test-cluster test-triton test-serving-clients bench lint scan format lock wheel clean

# A caller's settings for Python must not change what runs here.
unexport PYTHONPATH PYTHONHOME PYTHONWARNINGS PYTHONOPTIMIZE PYTHONSAFEPATH VIRTUAL_ENV
# Compiled modules are kept: every process of a run imports some two hundred of ours.
unexport PYTHONDONTWRITEBYTECODE

ifneq ($(origin PYTHON),command line)
PYTHON := python3.11 python3 python
endif

VENV_PYTHON := .venv/bin/python

# Calls set-up's program with the first Python 3.11 there is; takes its arguments.
define with_python
for python in $(PYTHON); do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
		exec "$$python" -E -s -m infra.setup $(1); \
	fi; \
done; \
echo "set-up needs Python 3.11, and none of these is one: $(PYTHON)." \
	"Install it (on Debian and Ubuntu: python3.11, python3.11-venv, python3.11-dev)" \
	"or name it: make setup PYTHON=/path/to/python3.11" >&2; \
exit 1
endef

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-25s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv: packages, PyTorch, Horovod built for it; the others call this first
	@$(call with_python)

run: setup ## run the whole loop once on the real data; a second call reuses finished stages
	@$(VENV_PYTHON) -m falaj run $(RUN_ARGS)

serve: setup ## serve the promoted model over HTTP and gRPC (SERVE_ARGS="--http-port 8100")
	@$(VENV_PYTHON) -m serving $(SERVE_ARGS)

gateway: setup ## put Envoy before the server: TLS 1.3, tokens, limits, shares of traffic (GATEWAY_ARGS)
	@$(VENV_PYTHON) -m falaj gateway run $(GATEWAY_ARGS)

up: setup ## start the platform: Prefect, MLflow, workers; deploy (UP_ARGS="--port 4300")
	@$(VENV_PYTHON) -m falaj up $(UP_ARGS)

# These do without set-up, which would make the environment anew under a platform that runs.
down: ## let runs end, then end the platform (DOWN_ARGS=--now: at once)
	@$(VENV_PYTHON) -m falaj down $(DOWN_ARGS)

status: ## what of the platform runs, and what of it does not
	@$(VENV_PYTHON) -m falaj status $(STATUS_ARGS)

doctor: ## look at all that the platform needs, and say what to do
	@$(VENV_PYTHON) -m falaj doctor $(DOCTOR_ARGS)

WORKERS := -n 2 --dist loadfile --no-loadscope-reorder # a file's tests share what its fixtures start

test: setup ## run the tests, but for the slow ones, on two workers (PYTEST_ARGS="-n 0": on none)
	@$(VENV_PYTHON) -m pytest $(WORKERS) $(PYTEST_ARGS)

# Slow tests, and properties with twelve times the examples. One of seven parts takes ten minutes: by
# seconds of a quiet host, doubled for the bench's tests, which run one after the other.
SLOW := -m "(slow or hypothesis) and not drill" --hypothesis-profile thorough --resume
PARTS := --splits 7 --durations-path tests/durations.json
PROGRAMS := sshd:openssh-server ip:iproute2 chromium:chromium buildah:buildah mmdebstrap:mmdebstrap \
	podman:podman runc:runc gocryptfs:gocryptfs fusermount3:fuse3 wireguard-go:wireguard-go \
	wg:wireguard-tools # with their Debian packages
TOOLS := .venv-triton/complete .venv-serving-clients/complete

test-slow: setup tools ## run the slow tests, or one part of seven (PART=3); resumes what was interrupted
	@$(VENV_PYTHON) -m pytest $(SLOW) $(WORKERS) $(if $(PART),$(PARTS) --group $(PART)) $(PYTEST_ARGS)

tools: $(TOOLS) ## what the slow tests need beside .venv: programs (as root, on Debian), environments
	@for each in $(PROGRAMS); do \
		command -v "$${each%:*}" >/dev/null || missing="$$missing $${each#*:}"; \
	done; \
	if [ -n "$$missing" ]; then \
		echo "installing$$missing for the slow tests"; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
			-y $$missing; } >/dev/null 2>&1 \
			|| echo "could not install$$missing; the summary names the tests that are skipped for it"; \
	fi

# Environments of tools whose packages cannot lie beside the project's. A registry that lacks them does
# not keep the other tests from running: theirs are then skipped, and the summary says why.
.SECONDEXPANSION:
.venv-%/complete: infra/$$(subst -,_,$$*)/requirements.in
	@$(VENV_PYTHON) -m venv .venv-$*
	@echo "making .venv-$* (half a minute)"
	@if .venv-$*/bin/python -m pip install --quiet -r $<; then : > $@; else \
		rm -rf .venv-$*; echo "no .venv-$*: its tests will be skipped. make test-$* tries again"; fi

mutants: setup ## change the deciding rules on purpose: do their tests notice? (MUTANTS_ARGS="release --sample 20")
	@$(VENV_PYTHON) -m tests.support.suite.mutation $(MUTANTS_ARGS)

drills: setup ## break every promise on purpose; resumes what was interrupted
	@$(VENV_PYTHON) -m pytest -m drill --timeout=0 --resume $(PYTEST_ARGS)

test-cluster: setup ## run the tests of profile cluster: Spark in local mode, its tables on S3 (SeaweedFS)
	@$(VENV_PYTHON) -m venv .venv-cluster
	@echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/python3.11/site-packages')" \
		> .venv-cluster/lib/python3.11/site-packages/falaj.pth
	@.venv-cluster/bin/python -m pip install --quiet -r infra/cluster/requirements.in
	@ln -sf ../../.venv/bin/weed .venv-cluster/bin/weed
	@JAVA_HOME=$$(sh infra/cluster/java.sh $(CURDIR)/.venv-cluster/java) && export JAVA_HOME && \
		.venv-cluster/bin/python -m pytest tests/contracts/cluster tests/contracts/features/test_profiles.py \
		-k cluster -m "not drill" -p no:unraisableexception $(PYTEST_ARGS) # py4j leaves sockets to the garbage collector

test-triton: setup .venv-triton/complete ## serve model repositories with a real Triton; later test runs do so too
	@test -e .venv-triton/complete
	@$(VENV_PYTHON) -m pytest tests/contracts/conversion/test_triton.py -m "not drill" $(PYTEST_ARGS)

test-serving-clients: setup .venv-serving-clients/complete ## ask the server by foreign clients and a fuzzer; later test runs do so too
	@test -e .venv-serving-clients/complete
	@$(VENV_PYTHON) -m pytest tests/contracts/serving -m "not drill" $(PYTEST_ARGS)

bench: setup .venv-mlserver/complete .venv-kserve/complete .venv-evidently/complete .venv-nannyml/complete .venv-river/complete ## measure what is promised, to docs/benchmarks (BENCH_ARGS=PART)
	@$(VENV_PYTHON) -m infra.bench $(BENCH_ARGS)
	@$(VENV_PYTHON) -m tests.support.suite.readme # which shows some of the figures

.PHONY: image
image: ## build the serving and the training image, without a daemon; as root (IMAGE_ARGS=serving)
	@infra/images/build $(IMAGE_ARGS)

lint: setup ## check style, format, types, directions of imports, and what the code costs its reader
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m infra.budget
	.venv/bin/lint-imports --cache-dir .ruff_cache/imports

scan: setup .venv-scan/complete .venv-serving-clients/complete ## look for weaknesses and secrets in the code (SCAN_ARGS=--advisories: a feed must answer)
	@$(VENV_PYTHON) -m infra.scan $(SCAN_ARGS)

# With digests: whoever could change what looks for weaknesses could have them overlooked.
.venv-scan/complete: infra/scan/requirements.lock
	@$(VENV_PYTHON) -m venv .venv-scan
	@echo "making .venv-scan (a minute)"
	@.venv-scan/bin/python -m pip install --quiet --require-hashes -r $< && : > $@

format: setup ## format the code
	$(VENV_PYTHON) -m ruff format .

lock: ## write infra/requirements.lock from pyproject.toml (LOCK_ARGS=--upgrade: newer versions)
	@$(call with_python,--lock $(LOCK_ARGS))

# From a clean folder: setuptools would take modules that are gone from an older `build`.
wheel: setup ## build the distribution into dist/
	@rm -rf build dist && $(VENV_PYTHON) -m pip wheel --quiet --no-deps --no-index --no-build-isolation \
		--wheel-dir dist . && rm -rf build && ls dist

clean: ## remove .venv, those of make test-* and .falaj, after asking (YES=1: without)
	@echo "This removes, and nothing else:"; \
	echo "  $(CURDIR)/.venv   the environment; make setup makes it again"; \
	echo "  $(CURDIR)/.venv-cluster  that of make test-cluster"; \
	echo "  $(CURDIR)/.venv-triton, .venv-serving-clients, .venv-mutation, .venv-scan  the same"; \
	echo "  $(CURDIR)/.falaj  ALL STATE: features, models, registry, reports"; \
	if [ "$(YES)" != 1 ]; then \
		printf 'Type yes to go on: '; read answer || answer=; \
		if [ "$$answer" != yes ]; then echo "Nothing was removed."; exit 1; fi; \
	fi; \
	rm -rf -- .venv .venv-cluster .venv-triton .venv-serving-clients .venv-mutation .venv-scan .venv-mlserver .venv-kserve .venv-evidently .venv-nannyml .venv-river .falaj

docs: setup ## build the documentation site into .site/, strictly: no broken link
	@$(VENV_PYTHON) -m tests.support.suite.reference
	@$(VENV_PYTHON) -m zensical build --clean --strict
