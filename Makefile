# make demo                        the main job, end to end, on this machine, with SmolLM2-135M (95 MB more)
# make demo ARGS="--json out.json" the same, and its table as data
# make test                        all tests, side by side, except those of the C core in C
# make test ARGS="tests/storage -x"  some of them, with pytest's arguments; WORKERS=0 for one process, as --pdb needs it
# make test-native                 the tests in C: plain, with sanitizers, on Arm under emulation; builds; a short fuzz
# make test-vllm-next              the tests with real engines on vLLM 0.33
# make test-sglang                 the storage backend in SGLang's CPU engine, in an environment of its own (2.5 GB)
# make test-lmcache                LMCache's server with our serde, and with a storage node as its store
# make test-dpu                    the data plane as on a BlueField, over the DOCA emulator, and with sanitizers
# make test-browser                the web pages in headless Chromium; screenshots in build/browser/
# make failure-matrix              faults of all kinds, every answer judged; results in build/failure-matrix/
# make models                      models of every family, with the plugin and without; results in build/models/
# make models ARGS="llama gemma3"  some of them: their rows are changed; ARGS=--list says which there are
# make combinations                every two abilities together; docs/reference/combinations.md has what is expected
# make test-chart                  the Helm chart and deploy/examples: schemas, refused values, the real programs
# make soak SOAK_HOURS=1           leaks, a crash loop, the simulation, engines under stress; writes soak.json
# make fuzz FUZZ_SECONDS=60        every fuzzer, in C and in Python, for its share of the time; counts inputs, exits 1
#                                  with the path of the input where one is found; ARGS="--json out.json", ARGS=--help
# make mutants                     the mutation score of each package, in some hours: changes that its tests detect
# make bench                       every benchmark; data and plots go to bench-results/
# make bench BENCH="codecs fetch"  some of them
# make wheels                      the wheels for x86-64 and aarch64 and the source distribution, in dist/
# make lint                        formatting, linting, types
# Everything lives in .venv; the first run takes some minutes and about 3 GB. Tests take 1 GB more, for Triton: where it
# cannot be installed, its kernels' tests are left out.

VENV ?= .venv
PYTHON ?= python3
ARGS ?=
WORKERS ?= auto
BENCH ?=
SOAK_HOURS ?= 1
FUZZ_SECONDS ?= 60
export VENV PYTHON

built_sources := $(shell find native proto CMakeLists.txt -type f)
ready := $(VENV)/.ready

# Tests side by side, and the builds of the C core with their tests in C, which are a target of their own.
pytest := $(VENV)/bin/python -m pytest --dist loadfile --max-worker-restart 0
native_builds := tests/native/test_build.py

.PHONY: demo test test-native test-dpu test-vllm-next test-sglang test-lmcache test-browser test-chart failure-matrix
.PHONY: models combinations soak fuzz mutants bench wheels lint format setup clean

demo: $(ready)
	-scripts/setup-demo-model
	PYTHONPATH=$(abspath $(VENV))/demo-model $(VENV)/bin/shadowserve demo $(ARGS)

test: $(ready)
	-scripts/setup-triton
	$(pytest) --numprocesses $(WORKERS) --ignore $(native_builds) $(ARGS)

test-native: $(ready)
	$(pytest) --numprocesses $(WORKERS) $(native_builds) $(ARGS)

test-dpu: $(ready)
	scripts/test-dpu $(ARGS)

test-browser: $(ready)
	scripts/test-browser $(ARGS)

test-chart: $(ready)
	scripts/test-chart $(ARGS)

test-vllm-next: $(ready)
	scripts/test-vllm-next $(ARGS)

test-sglang: $(ready)
	scripts/test-sglang $(ARGS)

test-lmcache: $(ready)
	scripts/test-lmcache $(ARGS)

failure-matrix: $(ready)
	$(VENV)/bin/python scripts/failure-matrix --output build/failure-matrix \
		--summary docs/reference/failure-matrix.md $(ARGS)

models: $(ready)
	$(VENV)/bin/python scripts/models --output build/models --summary docs/reference/models.md $(ARGS)

combinations: $(ready)
	TEST_NIGHTLY=1 $(VENV)/bin/python -m pytest tests/combinations $(ARGS)

soak: $(ready)
	$(VENV)/bin/python scripts/soak --hours $(SOAK_HOURS) $(ARGS)

fuzz: $(ready)
	$(VENV)/bin/python scripts/fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

mutants: $(ready)
	$(VENV)/bin/python -m pip install --quiet --no-deps -r scripts/requirements/mutants.txt
	$(VENV)/bin/python scripts/mutants shadowserve tests/shared tests/pool tests/simulation $(ARGS)
	$(VENV)/bin/python scripts/mutants storage_kv tests/storage $(ARGS)
	$(VENV)/bin/python scripts/mutants dpu_dataplane tests/dataplane $(ARGS)
	$(VENV)/bin/python scripts/mutants host_control tests/host $(ARGS)
	$(VENV)/bin/python scripts/mutants shadowserve_tools tests/tools $(ARGS)

bench: $(ready)
	scripts/bench $(BENCH)

wheels: $(ready)
	scripts/build-wheels

lint: $(ready)
	scripts/lint

format: $(ready)
	scripts/lint --fix

setup: $(ready)

$(ready): scripts/setup scripts/install-system-packages scripts/requirements/base.txt \
		scripts/requirements/engine-cpu.txt pyproject.toml $(built_sources)
	scripts/setup
	touch $@

clean:
	rm -rf build $(VENV)
