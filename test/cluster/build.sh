#!/usr/bin/env bash
# build.sh : builds every program of the cluster from Go modules, and the images that each node needs, into
# bin/cluster-<versions>/, and prints that directory. test/kubernetes/build.sh builds the Kubernetes programs, which are
# linked into the directory. Existing programs are not built again. Concurrent callers build one after the other.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
repository=$(readlink -m "$here/../..")
containerd=v2.4.2 runc=v1.5.2 cni=v1.9.1
coredns=$(awk '$2 == "github.com/coredns/coredns" || $3 == "github.com/coredns/coredns" { print $NF; exit }' "$here/coredns/go.mod")
out=$repository/bin/cluster-$containerd-$runc-$cni-$coredns
partial=$out/.partial
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9

# build NAME COMMAND... : runs the command, which writes the program NAME into directory $partial, and moves the program
# to its final place. An interrupted build therefore never leaves an incomplete program.
build() {
  local name=$1
  shift
  [ ! -x "$out/$name" ] || return 0
  echo "building $name" >&2
  SECONDS=0
  mkdir -p "$partial"
  GOBIN=$partial "$@" >&2
  mv "$partial/$name" "$out/$name"
  printf '  %-24s done in %d s\n' "$name" "$SECONDS" >&2
}

kubernetes=$("$here/../kubernetes/build.sh" etcd kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet kube-proxy)
ln -sfn "$kubernetes"/* "$out"

# go install PACKAGE@VERSION builds each program with its own go.mod, like its release.
export CGO_ENABLED=0
package=github.com/containerd/containerd/v2
for program in containerd containerd-shim-runc-v2 ctr; do
  build $program go install -buildvcs=false -tags "no_btrfs no_devmapper no_zfs no_aufs urfave_cli_no_docs" \
    -ldflags "-s -w -X $package/version.Version=$containerd -X $package/version.Package=$package" \
    $package/cmd/$program@$containerd
done
for plugin in main/ptp main/loopback ipam/host-local meta/portmap; do
  build ${plugin#*/} go install -buildvcs=false -ldflags "-s -w" github.com/containernetworking/plugins/plugins/$plugin@$cni
done
# Only runc needs C: pods with the RuntimeDefault seccomp profile start only if runc is built with libseccomp.
if [ ! -x "$out/runc" ] && ! pkg-config --exists libseccomp; then
  echo "build.sh: runc needs gcc, pkg-config and the libseccomp headers: run test/cluster/install-deps.sh" >&2
  exit 1
fi
build runc env CGO_ENABLED=1 go install -buildvcs=false -tags "seccomp urfave_cli_no_docs" \
  -ldflags "-s -w -X main.version=${runc#v}" github.com/opencontainers/runc@$runc
build coredns go build -C "$here/coredns" -buildvcs=false -ldflags "-s -w" -o "$partial/coredns" .
build pause go build -C "$repository" -buildvcs=false -ldflags "-s -w" -o "$partial/pause" ./test/cluster/pause

# image NAME : creates the image cluster.local/NAME:1 from the program NAME. The tag is not "latest", so the kubelet
# does not pull it.
image() {
  [ ! -f "$out/$1.tar" ] || return 0
  go run -C "$repository/internal/tools" -buildvcs=false ./image/cmd/mkimage \
    --binary "$out/$1" --name "cluster.local/$1:1" --out "$out/$1.tar" >/dev/null
}
image pause
image coredns
rmdir "$partial" 2>/dev/null || true
echo "$out"
