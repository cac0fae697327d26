#!/usr/bin/env bash
# build.sh : builds Helm of the release that go.mod pins into bin/helm-<version>, and prints that path. What is already there
# is never built again; two callers at once build one after the other.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cd "$here"
version=$(awk '$1 == "require" && $2 == "helm.sh/helm/v4" { print $3 } $1 == "helm.sh/helm/v4" { print $2 }' go.mod)
out=$(readlink -m "$here/../../../bin/helm-$version")
mkdir -p "$(dirname "$out")"
exec 9>"$out.lock"
flock 9
if [ ! -x "$out" ]; then
  echo "building helm ($version) from Go modules" >&2
  # The flags of bin/semmoe: what both compile of Kubernetes' client libraries is compiled once.
  CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$out.partial" helm.sh/helm/v4/cmd/helm
  mv "$out.partial" "$out"
fi
echo "$out"
