#!/usr/bin/env bash
# measure.sh [FLAG...] : measures the lossless probe on vLLM for CPUs, in bfloat16 with two ranks, and prints JSON. FLAGs are those of
# the command in this directory, for example --permutations 100. Needs 6 GB of memory; 120 checkpoints take 25 to 40 minutes on two cores.
# MODEL: another checkpoint directory, with tokenizer_config.json. PORT: another port (default: 18111). DTYPE: float32 or bfloat16 (default).
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
port=${PORT:-18111}
work=$(mktemp -d)
if [ -z "${MODEL:-}" ]; then
  MODEL=$work/model
  mkdir "$MODEL"
  cp "$here"/../../internal/refengine/testdata/tiny-qwen3moe/* "$here"/../vllm/checkpoint/* "$MODEL"
fi
export MODEL DTYPE=${DTYPE:-bfloat16} VLLM_SERVER_DEV_MODE=1 PLUGINS=$here/plugin
(cd "$here/../.." && go build -trimpath -o "$work/measure" ./test/lossless)
setsid "$here/../vllm/serve.sh" "$port" --worker-extension-cls semmoe_load_experts.Extension >"$work/server.log" 2>&1 &
server=$!
trap 'kill -- -$server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
until curl -sf -o /dev/null "http://127.0.0.1:$port/health"; do
  kill -0 $server 2>/dev/null || { tail -20 "$work/server.log" >&2; exit 1; }
  sleep 2
done
"$work/measure" --engine VLLM --address "http://127.0.0.1:$port" --model-path "$MODEL" --work "$work" "$@"
