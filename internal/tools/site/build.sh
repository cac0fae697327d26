#!/usr/bin/env bash
# build.sh VERSION OUT : writes the documentation of a version as a site, and fails on dead links and anchors. MkDocs is installed
# from requirements.txt into ${XDG_CACHE_HOME:-~/.cache}/semmoe/site-<hash>. Exit status 75: the package index cannot be reached.
# After a change of requirements.in:
#   uv pip compile requirements.in --python-version 3.11 --universal --generate-hashes --no-header --no-annotate -o requirements.txt
set -euo pipefail
version=${1:?usage: build.sh VERSION OUT}
out=$(realpath -m "${2:?usage: build.sh VERSION OUT}")
cd "$(dirname "$(readlink -f "$0")")"
hash=$(sha256sum requirements.txt | cut -c1-16)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/semmoe/site-$hash
if [ ! -e "$environment/installed" ]; then
  mkdir -p "$(dirname "$environment")"
  exec 9>"$environment.lock"
  flock 9
fi
if [ ! -e "$environment/installed" ]; then
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/python" -m pip --disable-pip-version-check -q install --retries 1 --timeout 20 --no-deps --require-hashes --only-binary :all: -r requirements.txt || {
    echo "build.sh: the packages of the site cannot be installed" >&2
    exit 75
  }
  touch "$environment/installed"
fi
VERSION=$version PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m mkdocs build --strict --quiet --site-dir "$out"
echo "site: $out/index.html"
