#!/usr/bin/env bash
# build.sh [oldest] [NAME...] : builds the named Kubernetes programs (default: the control plane and kubectl) of the release that
# go.mod pins, or oldest/go.mod, into bin/kubernetes-<version>/, and prints that directory. What is already there is never built
# again; two callers at once build one after the other. The first build compiles the control plane: about seven minutes on two cores.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cd "$here"
if [ "${1:-}" = oldest ]; then
  cd oldest
  shift
fi
version=$(awk '$1 == "k8s.io/kubernetes" { print $2; exit }' go.mod)
out=$(readlink -m "$here/../../bin/kubernetes-$version")
[ $# -gt 0 ] || set -- etcd kube-apiserver kube-controller-manager kube-scheduler kubectl
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9

minor=${version#v1.}
minor=${minor%%.*}
ldflags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  ldflags+=" -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$minor"
  ldflags+=" -X $package.gitCommit=module -X $package.gitTreeState=clean"
done

# Counts compiled packages on a terminal, and says every half minute how far it is elsewhere: the first build is long
# enough to be taken for a hang.
progress() {
  local name=$1 total=$2 count=0 last=0
  while read -r _; do
    count=$((count + 1))
    if [ -t 2 ]; then
      printf '\r  %-24s %4d packages compiled (of at most %d), %d s ' "$name" "$count" "$total" "$SECONDS" >&2
    elif [ $((SECONDS - last)) -ge 30 ]; then
      last=$SECONDS
      printf '  %-24s %4d packages compiled (of at most %d), %d s\n' "$name" "$count" "$total" "$SECONDS" >&2
    fi
  done
  [ ! -t 2 ] || printf '\r%78s\r' '' >&2
}

for name in "$@"; do
  [ ! -x "$out/$name" ] || continue
  package=k8s.io/kubernetes/cmd/$name
  [ "$name" != etcd ] || package=./cmd/etcd
  echo "building $name ($version) from Go modules" >&2
  SECONDS=0
  total=$(go list -deps "$package" | wc -l)
  log=$out/$name.log
  # -v names each package as it is compiled; real errors are kept in the log and shown.
  # The flags of bin/semmoe: both share compiled packages.
  if ! CGO_ENABLED=0 go build -trimpath -v -buildvcs=false -ldflags "$ldflags" -o "$out/$name.partial" "$package" 2> >(tee "$log" | progress "$name" "$total"); then
    sleep 1
    grep -vE '^[a-z0-9./_-]+$' "$log" >&2 || true
    echo "build.sh: building $name failed; the whole output is in $log" >&2
    exit 1
  fi
  mv "$out/$name.partial" "$out/$name"
  rm -f "$log"
  printf '  %-24s done in %d s\n' "$name" "$SECONDS" >&2
done
echo "$out"
