#!/usr/bin/env bash
# serve.sh PORT [FLAG...] : starts the installed vLLM with two expert-parallel ranks on the small checkpoint of the reference engine.
# DTYPE: float32 (default) or bfloat16. MODEL: another checkpoint directory. RANKS: another data parallel size. PLUGINS: directories of more
# plug-ins, separated by colons. SEMMOE_VLLM_DIR: see install.sh. The server is up when GET /health answers 200, 70 to 85 s later.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
port=${1:?usage: serve.sh PORT [FLAG...]}
shift
environment=$("$here/install.sh")
model=${MODEL:-}
if [ -z "$model" ]; then
  model=$(mktemp -d)
  cp "$here"/../../internal/refengine/testdata/tiny-qwen3moe/* "$here"/checkpoint/* "$model"
fi
# The variables are those of test/e2e/vllm_test.go, which has the reasons.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
export PYTHONPATH=$here/plugin${PLUGINS:+:$PLUGINS}
exec "$environment/bin/python" -m vllm.entrypoints.cli.main serve "$model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
  --data-parallel-size "${RANKS:-2}" --enable-expert-parallel --dtype "${DTYPE:-float32}" \
  --enforce-eager --max-model-len 1024 --max-num-seqs 8 "$@"
