#!/usr/bin/env bash
# verify.sh : fails, and says what to do, on generated files that are out of date, unformatted code, untidy modules, and
# what go vet and staticcheck find.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
# The flags of bin/semmoe: what is compiled for one serves the other.
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:-} -trimpath"
failed=0
complain() {
  echo "verify: $*" >&2
  failed=1
}

# Generated files: generate into the tree, and compare with what was there.
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
generated=(config charts api docs/api.md)
tar -cf "$before/tree.tar" "${generated[@]}"
make -s generate >/dev/null
mkdir "$before/tree"
tar -xf "$before/tree.tar" -C "$before/tree"
for path in "${generated[@]}"; do
  diff -r "$before/tree/$path" "$path" || complain "$path was out of date, and has been generated anew: commit it"
done

unformatted=$(gofmt -l $(git ls-files '*.go'))
[ -z "$unformatted" ] || complain "not formatted (gofmt -w): $unformatted"
for module in . internal/tools internal/tools/helm test/kubernetes test/kubernetes/oldest test/gateway test/argocd test/leaderworkerset test/prometheus test/cluster/coredns; do
  (cd "$module" && go mod tidy -diff >/dev/null) || complain "$module/go.mod is not tidy (go mod tidy)"
done
go vet ./... || complain "go vet found something"
go tool -modfile=internal/tools/go.mod staticcheck ./... || complain "staticcheck found something"

# The project speaks of itself alone.
words=$(git grep -nIwE 'TODO|FIXME|XXX' -- ':!*.sum' ':!*testdata*' ':!internal/tools/verify.sh' || true)
[ -z "$words" ] || complain "unfinished work: $words"
[ "$failed" = 0 ] && echo "verify: generated files, modules, format and lint are in order"
exit "$failed"
