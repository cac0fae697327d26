#!/usr/bin/env bash
# e2e.sh [COMMAND...] : makes a real cluster of two nodes with our image in it, runs COMMAND (default: the demo's scenario,
# and then the life of an installation) with KUBECONFIG set to it, and takes the cluster away again, whatever happens.
# IMAGE_TAR is the image (dist/semmoe.tar); ACTS=1 or ACTS=2 plays one act of the demo alone.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
tar=${IMAGE_TAR:-$repository/dist/semmoe.tar}
[ -r "$tar" ] || die "$tar cannot be read: make image"
cd "$repository"
# Killed outright, it runs no trap, and a cluster without an owner would keep the next one from starting.
setsid bash -c "tail --pid=$$ -f /dev/null; exec '$here/down.sh'" >/dev/null 2>&1 </dev/null &
watch=$!
trap 'kill -- -$watch; "$here/down.sh"' EXIT
trap 'exit 130' INT TERM
IMAGES=$tar "$here/up.sh" 2 >/dev/null
export CGO_ENABLED=0 # with -trimpath the flags of the binary: what is compiled for one serves the other
if [ $# -gt 0 ]; then
  "$@"
else
  go run -trimpath ./test/demo
  go test -trimpath -vet=off -count=1 -timeout 15m -v ./test/installation -args -cluster
fi
