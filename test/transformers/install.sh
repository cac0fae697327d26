#!/usr/bin/env bash
# install.sh ENVIRONMENT : installs the packages of requirements.txt for the interpreter of the virtual environment of vLLM
# (test/vllm/install.sh prints it), and prints their directory, for PYTHONPATH. The environment has PyTorch and transformers. Exit status
# 75: the package index cannot be reached.
set -euo pipefail
environment=${1:?usage: install.sh ENVIRONMENT}
cd "$(dirname "$(readlink -f "$0")")"
hash=$(cat requirements.txt install.sh | sha256sum | cut -c1-16)
out=${XDG_CACHE_HOME:-$HOME/.cache}/semmoe/transformers-$hash
if [ ! -e "$out" ]; then
  work=$(mktemp -d -p "$(dirname "$out")") # renamed when it is complete
  trap 'rm -rf "$work"' EXIT
  "$environment/bin/python" -m pip -q --disable-pip-version-check install --retries 0 --timeout 20 --no-deps --require-hashes --only-binary :all: \
    --target "$work/site" -r requirements.txt >&2 || exit 75
  mv -T "$work/site" "$out" 2>/dev/null || [ -e "$out" ] # another caller may have been faster
fi
echo "$out"
