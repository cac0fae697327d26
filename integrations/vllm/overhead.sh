#!/usr/bin/env bash
# overhead.sh ENVIRONMENT MODEL [arguments of semmoe_vllm.overhead] : measures the plug-in on CPUs. ENVIRONMENT: see test.sh.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
environment=${1:?usage: overhead.sh ENVIRONMENT MODEL [arguments]}
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here" "$work/source"
"$environment/bin/python" -m pip -q --disable-pip-version-check install --no-deps --no-build-isolation --no-index --target "$work/site" "$work/source"
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m semmoe_vllm.overhead "$@"
