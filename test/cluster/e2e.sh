#!/usr/bin/env bash
# e2e.sh [COMMAND...] : makes a real cluster of one node with our image in it, runs COMMAND (default: the demo's scenario)
# with KUBECONFIG set to it, and takes the cluster away again, whatever happens. IMAGE_TAR is the image (dist/semmoe.tar).
. "$(dirname "$(readlink -f "$0")")/lib.sh"
tar=${IMAGE_TAR:-$repository/dist/semmoe.tar}
[ -r "$tar" ] || die "$tar cannot be read: make image"
cd "$repository"
[ $# -gt 0 ] || set -- env CGO_ENABLED=0 go run -trimpath ./test/demo
trap '"$here/down.sh"' EXIT
trap 'exit 130' INT TERM
IMAGES=$tar "$here/up.sh" 1 >/dev/null
"$@"
