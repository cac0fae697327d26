#!/usr/bin/env bash
# fuzz.sh EXECUTIONS PACKAGE...: runs every fuzz target of the packages for a number of executions, without guidance by coverage: its
# instrumentation compiles all dependencies again, which takes longer than all executions. make soak is guided.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
executions=$1
shift
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for package in "$@"; do
  CGO_ENABLED=0 go test -c -trimpath -vet=off -o "$made/test" "./$package"
  for target in $(grep -h -o '^func Fuzz[A-Za-z0-9]*' "$package"/*_test.go | sed 's/^func //'); do
    if ! (cd "$package" && "$made/test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "${executions}x" -test.fuzzcachedir "$made/cache") >"$made/log" 2>&1; then
      cat "$made/log"
      echo "fuzz: $target of $package failed; the input is in $package/testdata/fuzz" >&2
      exit 1
    fi
    echo "$package $target: $executions executions"
  done
done
