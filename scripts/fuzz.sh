#!/bin/bash
# Builds every fuzz target with Clang and runs each for FUZZ_SECONDS (600), on its committed corpus. New inputs go to
# build/fuzz/corpus/<x>; a finding leaves its input there and ends with exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-600}
clang=$(command -v clang++ || compgen -c clang++- | sort -V | tail -n1)
cmake --preset fuzz -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_C_COMPILER="${clang/clang++/clang}"
cmake --build build/fuzz

failed=()
for program in build/fuzz/fuzz/fuzz_*; do
  [ -f "$program" ] && [ -x "$program" ] || continue
  name=${program##*/fuzz_}
  mkdir -p "build/fuzz/corpus/$name"
  echo "fuzz: $name, $seconds s"
  "$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/corpus/$name-" "build/fuzz/corpus/$name" "fuzz/corpus/$name" \
    >"build/fuzz/$name.log" 2>&1 || failed+=("$name")
  tail -n 3 "build/fuzz/$name.log"
done
[ ${#failed[@]} -eq 0 ] || { echo "fuzz: findings in ${failed[*]} (logs and inputs in build/fuzz)"; exit 1; }
echo "fuzz: no finding"
