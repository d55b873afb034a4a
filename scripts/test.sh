#!/bin/bash
# All that `make test` checks, stage by stage; one summary at the end. Exit code 0 only when every stage passed. A test
# or stage that is skipped is a failure when CI=true.
#   ASSAY_TEST_STAGES="build ctest pytest vllm sanitize lint"  to run a part
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
stages=${ASSAY_TEST_STAGES:-setup build ctest pytest vllm sanitize lint}
export logs=$root/build/test-logs
mkdir -p "$logs" && rm -f "$logs"/*.xml

# What each stage may take at most, in seconds: several times what it takes on two cores.
declare -A limit=([setup]=1200 [build]=1500 [ctest]=600 [pytest]=1200 [vllm_install]=1800 [vllm]=2100 [sanitize]=1800 [lint]=120)

setup() { scripts/setup.sh test; }
build() { cmake --preset ci && cmake --build build; }
ctest_() { ctest --test-dir build -j "$(nproc)" --output-on-failure --no-tests=error --output-junit "$logs/ctest.xml"; }
# A test that hangs is named, with what each thread does, and ends its pytest.
export PYTEST_ADDOPTS="-q -ra -p no:cacheprovider --durations=5 -o faulthandler_timeout=700 -o faulthandler_exit_on_timeout=true"
# A process for each folder, the longest first and a core for each: every folder has a conftest of its own, and what the
# tests of one attach must not reach another's. Each folder's output is printed whole when it is done.
pytest_() {
  printf '%s\n' attach cases e2e python parity weights | xargs -P "$(nproc)" -I '{}' bash -c '
    said=$(.venv/bin/python -m pytest --junit-xml="$1/pytest-{}.xml" "tests/{}" 2>&1)
    verdict=$?
    printf "tests/%s\n%s\n" "{}" "$said"
    exit $verdict' pytest "$logs"
}
# The real vLLM on the shipped model. Engines run side by side, each on a core of its own.
vllm_install() { scripts/setup.sh vllm; }
vllm() { .venv/bin/python -m pytest --durations=10 --basetemp=build/vllm-runs --junit-xml="$logs/vllm.xml" tests/vllm; }
# Address and undefined-behaviour sanitizers over the C++ tests and the fuzz corpora. Leaks are looked for too.
sanitize() {
  cmake --preset asan && cmake --build build/asan &&
    ctest --test-dir build/asan -j "$(nproc)" --output-on-failure --no-tests=error --output-junit "$logs/asan.xml"
}
lint() { scripts/format.sh --check && echo "formatting: clean"; }

# A stage in a shell and a process group of its own, ended with all that it started when its time is over.
running=
trap 'kill $running 2>/dev/null; exit 130' INT TERM
bounded() {  # STAGE FUNCTION
  set -m  # else SIGINT would be ignored in what is started
  timeout --kill-after=30 "${limit[$1]}" bash -c "set -uo pipefail; $(declare -f "$2"); $2" &
  running=$!
  set +m
  wait $running
  local verdict=$?
  case $verdict in 124 | 137) echo "$1 was stopped after ${limit[$1]} s" ;; esac
  return $verdict
}

# Skipped tests of JUnit files, named.
skipped_in() { python3 - "$@" <<'PY'
import os, sys, xml.etree.ElementTree as tree
for file in filter(os.path.exists, sys.argv[1:]):
    for case in tree.parse(file).iter("testcase"):
        if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            print(f"{case.get('classname')}.{case.get('name')}")
PY
}

passed=() failed=()
for stage in $stages; do
  run=$stage
  case $stage in ctest | pytest) run=${stage}_ ;; esac
  echo "== $stage"
  start=$SECONDS
  # vLLM is 3.5 GB to download, which is no part of what its tests may take.
  if { [ "$stage" != vllm ] || bounded vllm_install vllm_install; } && bounded "$stage" "$run"; then verdict=passed; else verdict=FAILED; fi
  case $stage in pytest) junit='pytest-*' ;; sanitize) junit=asan ;; *) junit=$stage ;; esac
  skips=$(skipped_in "$logs"/$junit.xml)
  if [ -n "$skips" ]; then
    echo "skipped in $stage:"
    echo "$skips" | sed 's/^/  /'
    [ "${CI:-}" != true ] || verdict=FAILED
  fi
  line="$stage: $verdict in $((SECONDS - start)) s${skips:+, $(echo "$skips" | wc -l) skipped}"
  if [ $verdict = passed ]; then passed+=("$line"); else failed+=("$line"); fi
  # Without these nothing behind can run.
  case $stage-$verdict in setup-FAILED | build-FAILED) break ;; esac
done

echo "== summary"
printf '%s\n' ${passed[@]+"${passed[@]}"} ${failed[@]+"${failed[@]}"}
[ ${#failed[@]} -eq 0 ]
