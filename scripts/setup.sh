#!/bin/bash
# Installs what building or testing assay needs and this machine lacks; says what, and is quick when nothing is missing.
#   scripts/setup.sh build     compiler, CMake, Ninja, header libraries: all that `make demo` needs
#   scripts/setup.sh test      build, and ccache, GoogleTest, and the Python packages of tests/requirements.txt in .venv
#   scripts/setup.sh vllm      test, and the real vLLM for CPU in .venv-vllm (3.5 GB)
#   scripts/setup.sh bench     test, and Google Benchmark
#   scripts/setup.sh fuzz      build, and Clang
#   scripts/setup.sh aarch64   build, and the cross compiler
# System packages come from apt (as root, or through sudo). Elsewhere the names are printed and the build goes on with
# what is there; CMake says what it does not find.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 4; }

# cmake and ninja may come from elsewhere than apt (pip, a newer release): what counts is that they run.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; }
have_cmake() { command -v cmake >/dev/null && at_least 3.25 "$(cmake --version | awk 'NR == 1 {print $3}')"; }
have_package() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }

missing_packages() {  # PACKAGE... -> those not there, one a line
  local package
  for package in "$@"; do
    case $package in
      g++) command -v "${CXX:-g++}" >/dev/null || echo g++ ;;
      clang) command -v clang++ >/dev/null || compgen -c clang++- >/dev/null || echo clang ;;
      cmake) have_cmake || echo cmake ;;
      ccache) command -v ccache >/dev/null || echo ccache ;;
      ninja-build) command -v ninja >/dev/null || echo ninja-build ;;
      *) have_package "$package" || echo "$package" ;;
    esac
  done
}

install_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "no dpkg here; these Debian packages, or what your system calls them, are needed: $*"
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || { [ -t 0 ] && command -v sudo >/dev/null; } ||
      die "missing packages, and neither root nor sudo to install them. Run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing system packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
    die "apt-get could not install: ${missing[*]}"
}

install_python() {
  local python=${PYTHON:-python3} stamp
  command -v "$python" >/dev/null || die "no $python; install Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than 3.10"
  stamp=.venv/.installed-$(sha256sum tests/requirements.txt | cut -c1-16)
  [ -e "$stamp" ] && return 0
  say "installing Python packages into .venv: $(grep -v '^#' tests/requirements.txt | tr '\n' ' ')"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install -qq --disable-pip-version-check -r tests/requirements.txt >&2 ||
    die "pip could not install tests/requirements.txt into .venv"
  rm -f .venv/.installed-*
  touch "$stamp"
}

# vLLM pins its torch, and draws in torchvision, torchaudio and torchcodec, whose builds do not load beside a CPU torch and
# then stop every import: they are taken out again. Where pip would choose a torch for GPUs, add
# --extra-index-url https://download.pytorch.org/whl/cpu by PIP_EXTRA_INDEX_URL.
install_vllm() {
  local python=${PYTHON:-python3} stamp pip
  stamp=.venv-vllm/.installed-$(sha256sum tests/vllm/requirements.txt | cut -c1-16)
  [ -e "$stamp" ] && return 0
  say "installing vLLM into .venv-vllm: $(grep -v '^#' tests/vllm/requirements.txt | tr '\n' ' ')"
  [ -x .venv-vllm/bin/python ] || "$python" -m venv .venv-vllm
  pip=(.venv-vllm/bin/python -m pip -qq --disable-pip-version-check)
  "${pip[@]}" install "$(grep '^torch==' tests/vllm/requirements.txt)" >&2 &&
    "${pip[@]}" install -r tests/vllm/requirements.txt >&2 ||
    die "pip could not install tests/vllm/requirements.txt into .venv-vllm"
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec >&2
  rm -f .venv-vllm/.installed-*
  touch "$stamp"
}

build_packages=(g++ cmake ninja-build nlohmann-json3-dev libcli11-dev libfmt-dev libopenblas-dev)
test_packages=("${build_packages[@]}" ccache libgtest-dev python3 python3-venv)

case ${1:-} in
  build) install_packages "${build_packages[@]}" ;;
  test) install_packages "${test_packages[@]}"; install_python ;;
  vllm) install_packages "${test_packages[@]}"; install_python; install_vllm ;;
  bench) install_packages "${test_packages[@]}" libbenchmark-dev; install_python ;;
  fuzz) install_packages "${build_packages[@]}" clang ;;
  aarch64) install_packages "${build_packages[@]}" g++-aarch64-linux-gnu ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
