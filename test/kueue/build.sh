#!/usr/bin/env bash
# build.sh : builds the manager of the Kueue release that go.mod pins as bin/kueue, and prints that path. A binary that
# is newer than the files of this directory is not built again.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cd "$here"
out=$(readlink -m "$here/../../bin/kueue")
mkdir -p "$(dirname "$out")"
exec 9>"$out.lock"
flock 9
if [ ! -x "$out" ] || [ -n "$(find . -type f -newer "$out")" ]; then
  echo "building the manager of Kueue from Go modules" >&2
  CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$out.partial" sigs.k8s.io/kueue/cmd/kueue
  mv "$out.partial" "$out"
fi
echo "$out"
