#!/bin/bash
# Formats the C and C++ sources with the one clang-format version that the project uses; --check only looks.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
tool=.venv/bin/clang-format
[ -x "$tool" ] || tool=clang-format-14
git ls-files -z '*.h' '*.c' '*.cpp' | xargs -0 "$tool" "${mode[@]}"
