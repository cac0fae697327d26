#!/usr/bin/env bash
# test.sh ENVIRONMENT : tests the plug-in with the vLLM for CPUs in a virtual environment (test/vllm/install.sh prints one). It builds the
# package and installs it into a temporary directory; no network is needed. EP_PLUGIN: the directory of the plug-in that supplies expert
# parallelism on CPUs (default: test/vllm/plugin). SEMMOE: the semmoe program (default: built by go). Further arguments go to pytest.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
environment=${1:?usage: test.sh ENVIRONMENT [pytest arguments]}
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here" "$work/source" # setuptools leaves its products in the source
"$environment/bin/python" -m pip -q --disable-pip-version-check install --no-deps --no-build-isolation --no-index --target "$work/site" "$work/source"
export PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 EP_PLUGIN=${EP_PLUGIN:-$(readlink -f "$here/../../test/vllm/plugin")}
if [ -z "${SEMMOE:-}" ]; then
  export SEMMOE=$work/semmoe
  (cd "$here/../.." && CGO_ENABLED=0 go build -trimpath -o "$SEMMOE" ./cmd/semmoe)
fi
cd "$work" # Python looks into the current directory first
"$environment/bin/python" -m pytest -q -c "$here/pyproject.toml" "$here/tests" "$@"
