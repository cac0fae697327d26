#!/usr/bin/env bash
# build.sh : builds the program of this directory, with the LeaderWorkerSet release that go.mod pins, as bin/leaderworkerset, and
# prints that path. What is younger than its sources is not built again.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cd "$here"
out=$(readlink -m "$here/../../bin/leaderworkerset")
mkdir -p "$(dirname "$out")"
exec 9>"$out.lock"
flock 9
if [ ! -x "$out" ] || [ -n "$(find . -type f -newer "$out")" ]; then
  echo "building the controllers of LeaderWorkerSet from Go modules" >&2
  # The flags of bin/semmoe: what is compiled for one serves the other.
  CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$out.partial" .
  mv "$out.partial" "$out"
fi
echo "$out"
