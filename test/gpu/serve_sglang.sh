#!/usr/bin/env bash
# serve_sglang.sh PORT [FLAG...] : starts the installed SGLang on two GPUs with two expert-parallel ranks on the small checkpoint, as the
# recording of test/engines and the measurement of test/lossless need it. PYTHON: the interpreter (default: python3). MODEL: another
# checkpoint directory. The server is up when GET /health answers 200, 70 to 220 s later.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
port=${1:?usage: serve_sglang.sh PORT [FLAG...]}
shift
exec "${PYTHON:-python3}" -m sglang.launch_server --model-path "${MODEL:-$here/../models/small-qwen3moe}" --served-model-name tiny \
  --host 127.0.0.1 --port "$port" --tp-size 2 --ep-size 2 --dp-size 2 --enable-dp-attention --enable-return-routed-experts --enable-metrics \
  --context-length 1024 --max-running-requests 16 "$@"
