# What a person types. The build itself is CMake (CMakePresets.json); scripts/ has the steps.
BUILD := build
JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

.PHONY: help build demo vllm test cases bench fuzz lint format check-aarch64 clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# Settings of an existing build folder are kept, so that build after test compiles nothing twice.
build:  ## build/assay and build/libassay.so
	@scripts/setup.sh build
	@[ -f $(BUILD)/build.ninja ] || cmake -G Ninja -B $(BUILD) -DCMAKE_BUILD_TYPE=Release -DASSAY_TESTS=OFF -DASSAY_BENCH=OFF
	@cmake --build $(BUILD) --target products

demo: build  ## the story: garbage beside sense, six healthy figures, and the first wrong tensor
	@$(BUILD)/assay demo

vllm: build  ## the real vLLM for CPU in .venv-vllm (3.5 GB), to attach to: docs/vllm.md
	@scripts/setup.sh vllm

test:  ## everything that is checked: C++ and Python tests, corpus replay, real vLLM, sanitizers (33 minutes on 2 cores)
	@scripts/test.sh

cases: build  ## reported faults as recordings, judged and scored, into build/cases.json (CASES_SEED, CASES_SIZE)
	@scripts/setup.sh test
	@PYTHONPATH=python .venv/bin/python -m cases.scoreboard --assay $(BUILD)/assay --out $(BUILD)/cases \
	  --json $(BUILD)/cases.json --controls $(or $(CASES_CONTROLS),20) --seed $(or $(CASES_SEED),1) --size $(or $(CASES_SIZE),0)

bench:  ## speed against baselines of the same run, into build/bench.json
	@scripts/setup.sh bench
	@cmake --preset bench
	@cmake --build $(BUILD)
	@.venv/bin/python bench/run.py --build $(BUILD) --out $(BUILD)/bench.json

fuzz:  ## every parser, FUZZ_SECONDS each (600)
	@scripts/setup.sh fuzz
	@scripts/fuzz.sh

lint:  ## formatting of the C++ sources
	@scripts/setup.sh test
	@scripts/format.sh --check

format:  ## apply the formatting
	@scripts/setup.sh test
	@scripts/format.sh

check-aarch64:  ## cross-compile libraries and program for aarch64
	@scripts/setup.sh aarch64
	@cmake -G Ninja -B $(BUILD)/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake -DCMAKE_BUILD_TYPE=Release \
	  -DASSAY_TESTS=OFF -DASSAY_BENCH=OFF -DASSAY_WERROR=ON
	@cmake --build $(BUILD)/aarch64

clean:  ## remove build/ (.venv stays)
	rm -rf $(BUILD)
