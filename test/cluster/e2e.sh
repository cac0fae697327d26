#!/usr/bin/env bash
# e2e.sh [COMMAND...] : creates a real cluster of two nodes with the images of operator and reference engine, runs COMMAND (default: the demo's
# scenario, and then the installation test) with KUBECONFIG set to the cluster, and removes the cluster in any case.
# IMAGE_TAR is the operator's image (default: dist/semmoe.tar). ACTS=1 or ACTS=2 runs only one act of the demo.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
tar=${IMAGE_TAR:-$repository/dist/semmoe.tar}
engine_tar=$repository/dist/semmoe-refengine.tar
for file in "$tar" "$engine_tar"; do
  [ -r "$file" ] || die "$file cannot be read: run make image"
done
cd "$repository"
# After SIGKILL no trap runs, and a cluster without an owner would prevent the start of the next one.
setsid bash -c "tail --pid=$$ -f /dev/null; exec '$here/down.sh'" >/dev/null 2>&1 </dev/null &
watch=$!
trap 'kill -- -$watch; "$here/down.sh"' EXIT
trap 'exit 130' INT TERM
IMAGES="$tar $engine_tar" "$here/up.sh" 2 >/dev/null
export CGO_ENABLED=0 # with -trimpath the flags of the binary: what is compiled for one serves the other
if [ $# -gt 0 ]; then
  "$@"
else
  go run -trimpath ./test/demo
  go test -trimpath -vet=off -count=1 -timeout 15m -v ./test/installation -args -cluster
fi
