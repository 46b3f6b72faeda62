# make demo        85 M parameters, two CPU ranks, five systems; a save  make test     the tests, without the slow ones
# make test-all    all tests                                            make lint      formatting, ruff, mypy
# make format      let the tools format                                 make clean     remove .venv and caches
# make docs        the site, in build/site; a warning is an error       make dist      sdist and pure wheel, in dist
# make wheels      compiled wheels (BW_AOT=cpu), one for each of PYTHONS='python3.12 python3.13', in dist/compiled. They need the C
#                  library of this machine or a newer one: release in a manylinux container. Needs auditwheel and patchelf
# make tidy        clang-tidy over csrc and the native tests, up to 15 minutes; TIDY='pool.*' only where the path has this
# make gpu         all that needs a GPU, in 8 minutes at most; results in OUT (build/gpu)
# make mutants     the tests of kernels and optimizer on broken code: one place broken at a time, hours
# make matrix      other Pythons and torches, minutes for each pair; MATRIX=--cuda-builds runs all, of many GB in all,
#                  MATRIX='--cell 3.12:2.13.0' one
#
# Needs python3 (>= 3.10) with venv, g++ and make. Each target does its own set-up, in .venv, once; but `make gpu` installs
# nothing: it takes python3 as it is, with torch, pybind11, ninja and pytest, and needs nvcc.
# TORCH is handed to pip as it stands: make demo TORCH=torch==2.12.0, or TORCH=/path/to/torch.whl.

PYTHON ?= python3
OUT ?= build/gpu
# Two workers a core: tests wait for much, and promise times that more workers would break.
JOBS ?= $(shell expr $$(nproc 2> /dev/null || echo 2) \* 2)
PYTHONS ?= $(PYTHON)
AUDITWHEEL ?= auditwheel
TORCH ?= $(shell grep '^torch==' constraints.txt)

VENV := .venv
BIN := $(VENV)/bin
SETUP := pyproject.toml setup.py build_backend.py constraints.txt tests/beside_torch.py
# Another TORCH or PYTHON is another environment: nothing of the one before is left in it.
INSTALLED := $(VENV)/.installed-$(shell (echo '$(TORCH)'; $(PYTHON) -VV) 2>&1 | cksum | cut -d' ' -f1)
BUILT := $(VENV)/.built
SOURCES := $(shell find csrc -type f) $(wildcard python/bucketwheel/native/*.py)
CXX_FILES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu')

# Workers and ranks read what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all mutants gpu matrix lint tidy format docs dist wheels setup clean
.DELETE_ON_ERROR:

# First 85 M parameters by five systems: their memory, speed and losses, as a table and as pictures in build/demo. The batches
# are small, as two cores have 4 minutes. Then a small GPT saves, resumes, and must come to the same bits.
DEMO := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --zero3
demo: setup
	$(DEMO) --compare ddp,zero,fsdp2 --plot build/demo --layers 12 --width 768 --heads 12 --context 64 --batch 2 \
	  --accumulate 1 --steps 8 --warmup 4 --lr 2e-4 --evaluate-every 4 --evaluate-batches 2
	@cp build/demo/demo.png .
	$(DEMO) --steps 24 --evaluate-every 12 --save build/demo/checkpoint --every 16 --check-resume

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"
	@$(MAKE) --no-print-directory lint docs

# The times that are promised for failures are held to the letter where no other test runs.
test-all: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest tests/faults -m "not slow"

mutants: setup
	$(BIN)/python tests/mutate_kernels.py
	$(BIN)/python tests/mutate_optim.py

gpu:
	@$(PYTHON) tests/gpu/run_all.py --out '$(OUT)'

matrix:
	@$(PYTHON) tests/matrix.py $(MATRIX)

lint: $(INSTALLED)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tidy: $(INSTALLED)
	$(BIN)/cmake -S cmake --preset tidy -DPython_EXECUTABLE='$(abspath $(BIN)/python)'
	$(BIN)/python $(BIN)/run-clang-tidy.py -quiet -clang-tidy-binary $(BIN)/clang-tidy -p build/cmake/tidy \
	  '/(csrc|tests/native)/.*$(TIDY)[^/]*\.cpp$$'

format: $(INSTALLED)
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# With --quiet a warning would be none. The variable: mkdocs-material advertises its successor at every build.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

dist: $(INSTALLED)
	rm -f dist/*.*
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist

# pybind11 makes a module for one Python; torch is not part of it (tests/unit/test_abi.py), so the number stays small.
wheels:
	rm -rf build/wheels dist/compiled
	for python in $(PYTHONS); do BW_AOT=cpu $$python -m pip wheel --no-deps --wheel-dir build/wheels . || exit 1; done
	$(AUDITWHEEL) repair --wheel-dir dist/compiled build/wheels/*.whl

clean:
	rm -rf $(VENV) build dist python/*.egg-info .pytest_cache .mypy_cache .ruff_cache demo.png

setup: $(BUILT)

$(BUILT): $(INSTALLED) $(SOURCES)
	$(BIN)/python -c "import bucketwheel.native.modules as build; build.native()"
	@touch $@

$(INSTALLED): $(SETUP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "bucketwheel needs Python 3.10 or later; '$(PYTHON)' is not (choose one: make PYTHON=python3.12)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "'$(PYTHON)' has no venv (Debian: apt install python3-venv)"; exit 1; }
	@command -v $${CXX:-c++} > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null || \
	  { echo "no C++ compiler found (Debian: apt install g++; or name one with CXX=...)"; exit 1; }
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) $(VENV)
	@echo "installing $(TORCH) and bucketwheel into $(VENV)"
	$(BIN)/python -m pip install --quiet $(TORCH)
	extras=$$($(BIN)/python tests/beside_torch.py $(VENV)/constraints.txt) && \
	  $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[$$extras]"
	@$(BIN)/python tests/beside_torch.py $(VENV)/constraints.txt --check
	@$(FETCH_HEADERS)
	@rm -f $(VENV)/.installed-*
	@touch $@

# Debian ships Python's headers apart (python3-dev). Where they are missing they are unpacked into .venv, which needs no
# root; bucketwheel/native/toolchain.py looks there too, and says what to install if this did not work.
define FETCH_HEADERS
name=$$($(BIN)/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
if [ ! -f "$$include/Python.h" ] && command -v apt-get > /dev/null; then \
  echo "Python.h is missing: unpacking lib$$name-dev into $(VENV)/include"; \
  (mkdir -p $(VENV)/headers && cd $(VENV)/headers && apt-get -qq download lib$$name-dev && dpkg -x ./*.deb . && \
    cp -r usr/include/. ../include/); \
  rm -rf $(VENV)/headers; \
fi
endef
