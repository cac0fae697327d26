#!/usr/bin/env bash
# install.sh : installs the clients of requirements.txt (Python) and package-lock.json (Node), and prints their directory: a virtual
# environment that contains node_modules. SEMMOE_CLIENTS_DIR names the directory (default:
# ${XDG_CACHE_HOME:-~/.cache}/semmoe/clients-<hash of the lists and this file>), PYTHON the interpreter (3.11 to 3.14; default: python3).
# The configurations of pip and npm select the package indexes. A finished directory is never installed again, and two callers at once
# install one after the other. The installation takes 900 MB of disk. Exit status 75: a package index cannot be reached.
#
# After a change of requirements.in or package.json:
#   uv pip compile requirements.in --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -o requirements.txt
#   npm install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
hash=$(cat requirements.txt package-lock.json install.sh | sha256sum | cut -c1-16)
out=${SEMMOE_CLIENTS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/semmoe/clients-$hash}
python=${PYTHON:-python3}

# The mark is written last: a directory without it, or with that of other lists, is replaced.
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
  "$python" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' ||
    fail "$python is not supported: it must be Python 3.11 to 3.14 with the venv module"
  [ "$(node -p 'process.versions.node.split(".")[0] >= 20' 2>/dev/null)" = true ] && command -v npm >/dev/null ||
    fail "node is not supported: it must be Node 20 or later with npm"
  if [ -e "$out" ] && [ ! -e "$out/pyvenv.cfg" ]; then
    fail "SEMMOE_CLIENTS_DIR: $out is not a virtual environment, and is left as it is"
  fi
  echo "installing the clients into $out" >&2
  rm -rf "$out"
  "$python" -m venv "$out" || fail "failed to make a virtual environment in $out"
  pip=("$out/bin/python" -m pip --disable-pip-version-check)
  "${pip[@]}" -q download --retries 0 --timeout 20 --no-deps --dest "$out/probe" "$(grep -o '^annotated-types==[0-9.]*' requirements.txt)" &&
    (cd "$out/probe" && npm view --fetch-retries 0 --fetch-timeout 20000 zod version >/dev/null) ||
    fail "a package index cannot be reached" 75
  "${pip[@]}" -q install --no-deps --require-hashes --only-binary :all: -r requirements.txt
  cp package.json package-lock.json "$out"
  npm ci --prefix "$out" --ignore-scripts --no-audit --no-fund --loglevel error >&2
  echo "$hash" >"$out/installed"
fi
echo "$out"
