#!/usr/bin/env bash
# Prepares a fresh Debian or Ubuntu machine: the missing apt packages, then a hash-locked environment in .venv.
# Safe to run again: it installs only what is missing. Needs root or sudo for apt only.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }

# command the tests look for, and the package that brings it
declare -A packages=(
  [podman]=podman [runc]=runc [mmdebstrap]=mmdebstrap
  [gcc]=gcc [g++]=g++ [ssh]=openssh-client [flock]=util-linux
)
missing=()
for command in "${!packages[@]}"; do
  command -v "$command" > /dev/null || missing+=("${packages[$command]}")
done
python3 -c 'import ensurepip' 2> /dev/null || missing+=(python3-venv)
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
if [ "${#missing[@]}" -gt 0 ]; then
  echo "setup: installing with apt: ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
fi

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: Bedplate's controller needs Python 3.11 or newer; python3 here is $(python3 -V)" >&2
  exit 1
}

[ -x .venv/bin/python ] || python3 -m venv .venv
# pip installs uv and nothing else; --isolated: a machine's pip configuration must not add constraints.
.venv/bin/python -m pip --isolated install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock \
  || .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock
export VIRTUAL_ENV="$PWD/.venv"
# Compiled once here: where Python may not write bytecode, every command would compile every library again.
.venv/bin/uv pip sync --quiet --require-hashes --compile-bytecode requirements/dev.lock
.venv/bin/uv pip install --quiet --no-deps --no-build-isolation --editable .
.venv/bin/python -m compileall -q src
echo "setup: ready ($(.venv/bin/python -V), $(.venv/bin/uv --version))"
