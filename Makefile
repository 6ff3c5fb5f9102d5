# make demo   set up, rewrite a real model, verify it and print the result
# make test   the product's tests   make check  lint, types, layers        make bench  benchmarks
# make test-tools  developers' tooling   make samples  the shell blocks of samples   make test-slow  what takes minutes
# make test-processes  training and inference in several processes
# make test-isas  the kernels on every instruction set   make test-emulation  the CUDA kernels on emulated threads
# make test-cuda  the same with every case (more than five minutes)   make test-exports  models exported again and compared
#                 with the committed ones
# make mutants FILE=mxfp8_graph/policy/plan.py TESTS=tests/mxfp8_graph/test_plan.py
#                 changes FILE in one place at a time (mutmut) and lists the changes that TESTS leave unnoticed
# make gpu-test, make gpu-bench  the same on a GPU        make gpu-sanitize  compute-sanitizer on it
# make gpu-first  the first half hour on one, call by call
# make test-hosts  rewritten models in programs that serve them, in three environments (gigabytes; headers and
#                  onnxruntime-node are tried where ONNXRUNTIME_INCLUDE and NODE_PATH say they are)
# make fuzz       FUZZ_COUNT damaged ONNX models, made from FUZZ_SEED: how the rewrite of each ends
# make sanitize   the native library under a grid of gemms and under hostile arguments, with Address-, UndefinedBehavior- and
#                 ThreadSanitizer (needs cmake and GCC 12; five minutes)
# make windows    the library for Windows and a grid of gemms on Wine (needs cmake and the package wine; five minutes)
# make docs       the pages of docs/ as a site, in build/site; fails on a dead link
# make wheels     dist/: the source distribution and wheels for Linux, Windows and macOS, the one of this machine tried in
#                 fresh environments of every Python that is found; no compiler but what the package index has
# make versions   the tests against the lowest and the newest dependencies on every Python that is found, a table: gigabytes
#                 and hours; VERSIONS='--row 3.10-lowest -- tests/test_x.py' chooses, VERSIONS=--help says what
# make aarch64    the wheel for aarch64 and a grid of gemms in an emulator of three processors (Debian's packages: see
#                 .ci/aarch64.py)      make aarch64-tests   the tests of mxfp8_ops there (nine minutes)
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test test-tools test-processes samples test-isas test-emulation test-cuda test-exports test-slow mutants test-hosts check format docs wheels versions aarch64 aarch64-tests gpu-library gpu-test gpu-sanitize gpu-first gpu-bench bench sanitize windows fuzz clean

# One stamp per set of extras: a changed pyproject.toml or C++ source installs again.
SOURCES := pyproject.toml constraints.txt custom_ops/CMakeLists.txt $(shell find custom_ops/mxfp8_ops/src -name '*.cpp' -o -name '*.h')
FORMATTED := $(shell find custom_ops/mxfp8_ops/src tests benchmarks samples -regex '.*\.\(c\|cpp\|h\|cu\|cuh\)')

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The C++ is built inside of the environment: two environments of one clone share no build, and a second install of one compiles
# what changed only. `pip install .` builds in a temporary folder.
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --config-settings=build-dir=$(VENV)/build

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(INSTALL) --quiet --editable '.[cpu,torch,test,cuda-test,bench,dev]'
	@touch $@

$(VENV)/.demo: $(BIN)/python $(SOURCES)
	$(INSTALL) --editable '.[demo]'
	@touch $@

# An environment that has everything has what the demo needs.
demo: $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.demo)
	$(BIN)/python samples/01_minilm_onnx/minilm.py --folder demo
	$(BIN)/mxfp8-graph verify demo/minilm.onnx demo/minilm.mxfp8.onnx --max-rel-l2 0.15

# The tiers of tests; docs/contributing.md says what is in each. .ci/tiers.py chooses among them by what changed.
PYTEST := $(BIN)/python -m pytest
QUICK := not slow and not gpu and not tools and not samples and not processes and not cuda

test: $(VENV)/.installed
	$(PYTEST) -m '$(QUICK)' -n 2 --dist loadfile --no-loadscope-reorder

test-tools: $(VENV)/.installed
	$(PYTEST) -m 'tools and not slow and not gpu' -n 2 --dist loadfile

test-processes: $(VENV)/.installed
	$(PYTEST) -m 'processes and not slow and not gpu' -n 2 --dist loadfile

samples: $(VENV)/.installed
	$(PYTEST) -m 'samples and not slow and not gpu' tests/test_documentation.py

test-isas: $(VENV)/.installed
	MXFP8_TEST_ISAS=all $(PYTEST) -m '$(QUICK)' -n 2 --dist loadfile tests/mxfp8_ops

test-emulation: $(VENV)/.installed
	$(PYTEST) -m 'cuda and not slow and not gpu' -n 2 --dist loadfile

test-cuda: $(VENV)/.installed
	$(PYTEST) -m 'cuda and not gpu' -n 2 --dist loadfile

test-exports: $(VENV)/.installed
	$(PYTEST) -m slow tests/test_structures.py

test-slow: $(VENV)/.installed
	MXFP8_TEST_ISAS=all $(PYTEST) -m slow

# Links to both packages side by side, because mutmut names a module by the path of its file. Not the Python of the environment:
# its editable install would import the unchanged files.
MUTANTS := build/mutants
LINKED := Makefile README.md benchmarks custom_ops custom_ops/mxfp8_ops docs mxfp8_graph pyproject.toml samples tests
MUTMUT = PYTHONPATH=$$(echo $(abspath $(VENV))/lib/python3*/site-packages) $(PYTHON) -m mutmut
mutants: $(VENV)/.installed
	@mkdir -p $(MUTANTS) && ln -sfn $(LINKED:%=../../%) $(MUTANTS)
	@printf '%s\n' '[mutmut]' source_paths= '  mxfp8_graph' '  mxfp8_ops' 'only_mutate=$(FILE:custom_ops/%=%)' also_copy=custom_ops \
	  'pytest_add_cli_args=-pno:cacheprovider' pytest_add_cli_args_test_selection= $(TESTS:%='  %') >$(MUTANTS)/setup.cfg
	cd $(MUTANTS) && $(MUTMUT) run && $(MUTMUT) results

# optimum-onnx needs an older transformers than our tests, and Olive an older pydantic, so each has an environment of its
# own. Two packages are there for files in them: amd-quark has the published headers of ONNX Runtime, nvidia-pytriton a Triton server.
HOSTS := $(VENV)-hosts
OPTIMUM := $(VENV)-hosts-optimum
OLIVE := $(VENV)-hosts-olive

test-hosts:
	$(PYTHON) -m venv $(HOSTS) && $(PYTHON) -m venv $(OPTIMUM) && $(PYTHON) -m venv $(OLIVE)
	$(HOSTS)/bin/python -m pip install --quiet --constraint constraints.txt '.[torch,test,hosts]'
	$(HOSTS)/bin/python -m pip install --quiet --no-deps amd-quark==0.13 nvidia-pytriton==0.7.0
	$(HOSTS)/bin/python -m pytest tests/mxfp8_graph -k 'test_hosts or test_integrations'
	$(HOSTS)/bin/python -m pytest tests/test_documentation.py -k 'genai or ray or c_and_cpp or pretrained'
	grep -v ^transformers constraints.txt >$(OPTIMUM)/constraints.txt
	$(OPTIMUM)/bin/python -m pip install --quiet --constraint $(OPTIMUM)/constraints.txt '.[torch,hosts-optimum]'
	$(OPTIMUM)/bin/python -m pytest tests/test_documentation.py -k 09_sentence_transformers
	$(OLIVE)/bin/python -m pip install --quiet --constraint constraints.txt '.[torch,hosts-olive]'
	$(OLIVE)/bin/python -m pytest tests/mxfp8_graph/test_hosts_olive.py
	$(OLIVE)/bin/python -m pytest tests/test_documentation.py -k 17_olive

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir build/mypy-win32
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict --site-dir build/site

build/wheels/.installed: pyproject.toml
	$(PYTHON) -m venv build/wheels
	build/wheels/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/wheels/bin/python -m pip install --quiet --group wheels
	@touch $@

wheels: build/wheels/.installed
	build/wheels/bin/python .ci/wheels.py

build/versions/.installed: pyproject.toml
	$(PYTHON) -m venv build/versions
	build/versions/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/versions/bin/python -m pip install --quiet --group versions
	@touch $@

versions: build/versions/.installed
	build/versions/bin/python .ci/versions.py $(VERSIONS)

aarch64 aarch64-tests: build/wheels/.installed
	build/wheels/bin/python .ci/aarch64.py dist/*_aarch64.whl $(if $(filter aarch64-tests,$@),--tests)

# On a machine with a GPU, PyTorch, CuPy and cmake: no virtual environment, no network. With onnxruntime, that too.
gpu-library:
	cmake -S custom_ops -B build/gpu -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/gpu/mxfp8_ops >/dev/null && \
	  cmake --build build/gpu --parallel >/dev/null

gpu-test: gpu-library
	PYTHONPATH=.:custom_ops:build/gpu $(PYTHON) tests/run_on_gpu.py --log $${OUT:-build/gpu}/gpu-test.txt \
	  tests/mxfp8_ops/test_cuda_device.py tests/mxfp8_ops/test_cuda_device_fp8.py tests/mxfp8_ops/test_ort_device.py

gpu-sanitize: gpu-library
	PYTHONPATH=.:custom_ops:build/gpu $(PYTHON) tests/run_on_gpu.py --log $${OUT:-build/gpu}/gpu-sanitize.txt \
	  tests/mxfp8_ops/test_cuda_sanitized.py

# The first half hour on a GPU: CALL=A, then what its summary says. STEP names one step, DRY_RUN=1 needs no GPU.
CALL ?= A
gpu-first:
	$(PYTHON) tests/gpu_first.py $(CALL) $(if $(STEP),--step $(STEP)) $(if $(DRY_RUN),--dry-run) --out $${OUT:-build/gpu/first-$(CALL)}

gpu-bench: gpu-library
	PYTHONPATH=.:custom_ops:build/gpu $(PYTHON) benchmarks/gpu_bench.py --out $${OUT:-benchmarks/results}

bench: $(VENV)/.installed
	@for script in gemm quantize embedding fused attention ort_optimizers ort_leave_one_out whole_models growth scaling torch_linear training te_training distributed op_overhead rewrite_speed many_matmuls cuda_planning sass conformance distributed_8b without_library stock_linears presets session_memory production retrieval batches convolutions ocr eager; do echo "== $$script"; $(BIN)/python benchmarks/$$script.py || exit 1; done

sanitize: $(VENV)/.installed
	@for sanitizers in 'address;undefined' thread; do \
	  folder=$(CURDIR)/build/sanitize-$${sanitizers%;*}; \
	  cmake -S custom_ops -B $$folder -DMXFP8_TEST_PROGRAMS=ON "-DMXFP8_SANITIZE=$$sanitizers" >/dev/null && \
	  cmake --build $$folder --parallel 2 --target mxfp8_gemms >/dev/null && \
	  echo "== $$sanitizers sanitizer" && export TSAN_OPTIONS=halt_on_error=1 && $$folder/mxfp8_gemms && \
	  LD_PRELOAD=$$(g++ -print-file-name=lib$$(echo $$sanitizers | cut -c 1)san.so) ASAN_OPTIONS=detect_leaks=0 \
	    HOSTILE_LIBRARY=$$folder HOSTILE_CALLS=100000 $(PYTEST) -s -m 'not slow' tests/mxfp8_ops/test_native_hostile.py || exit 1; \
	done

# Wine's settings are outside of this folder and go afterwards: they link to /, and the source distribution follows links.
windows: build/wheels/.installed
	@command -v wine >/dev/null || { echo 'windows: wine is not found; expected it on the PATH; install the package wine'; exit 1; }
	CXX='$(CURDIR)/build/wheels/bin/python -m ziglang c++ -target x86_64-windows-gnu' \
	  cmake -S custom_ops -B build/windows -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=x86_64 \
	  -DMXFP8_TEST_PROGRAMS=ON >/dev/null
	cmake --build build/windows --parallel 2 >/dev/null
	@folder=$$(mktemp -d) && trap 'wineserver -k; rm -rf "$$folder"' EXIT && \
	  export HOME=$$folder WINEPREFIX=$$folder/wine WINEDEBUG=-all && cd build/windows && \
	  wine mxfp8_gemms.exe

FUZZ_COUNT ?= 5000
FUZZ_SEED ?= 0
fuzz: $(VENV)/.installed
	FUZZ_COUNT=$(FUZZ_COUNT) FUZZ_SEED=$(FUZZ_SEED) $(PYTEST) -s tests/fuzz

clean:
	rm -rf $(VENV) build demo
