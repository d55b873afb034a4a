#!/bin/bash
# All that `make test` checks, stage by stage; one summary at the end. Exit code 0 only when every stage passed. A test
# or stage that is skipped is a failure when CI=true.
#   ASSAY_TEST_STAGES="build ctest pytest vllm sanitize lint"  to run a part
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
stages=${ASSAY_TEST_STAGES:-setup build ctest pytest vllm sanitize lint}
logs=$root/build/test-logs
mkdir -p "$logs" && rm -f "$logs"/*.xml

setup() { scripts/setup.sh test; }
build() { cmake --preset ci && cmake --build build; }
ctest_() { ctest --test-dir build -j "$(nproc)" --output-on-failure --no-tests=error --output-junit "$logs/ctest.xml"; }
# A process for each folder, the longest first and a core for each: every folder has a conftest of its own, and what the
# tests of one attach must not reach another's. Each folder's output is printed whole when it is done.
pytest_() {
  printf '%s\n' attach python e2e cases weights parity | xargs -P "$(nproc)" -I '{}' bash -c '
    said=$(.venv/bin/python -m pytest -q -ra -p no:cacheprovider --junit-xml="$1/pytest-{}.xml" "tests/{}" 2>&1)
    verdict=$?
    printf "tests/%s\n%s\n" "{}" "$said"
    exit $verdict' pytest "$logs"
}
# The real vLLM on the shipped model: engines are started one after the other, each with both cores.
vllm() {
  scripts/setup.sh vllm &&
    timeout 1500 .venv/bin/python -m pytest -q -ra -p no:cacheprovider --durations=10 --junit-xml="$logs/vllm.xml" tests/vllm
}
# Address and undefined-behaviour sanitizers over the C++ tests and the fuzz corpora. Leaks are looked for too.
sanitize() {
  cmake --preset asan && cmake --build build/asan &&
    ctest --test-dir build/asan -j "$(nproc)" --output-on-failure --no-tests=error --output-junit "$logs/asan.xml"
}
lint() { scripts/format.sh --check && echo "formatting: clean"; }

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
  if $run; then verdict=passed; else verdict=FAILED; fi
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
