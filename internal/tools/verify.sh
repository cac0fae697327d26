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
generated=(config charts api docs/api.md docs/engines.md)
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
tools=$PWD/internal/tools
for module in . internal/tools; do # what test/prometheus needs takes minutes to compile: make prometheus vets it
  (cd "$module" && go vet ./...) || complain "go vet found something in $module"
  (cd "$module" && go tool -modfile="$tools/go.mod" staticcheck ./...) || complain "staticcheck found something in $module"
done

# The plugin is for people's own machines: it compiles for their systems (docs/kubectl.md).
for platform in darwin/arm64 windows/amd64; do
  GOOS=${platform%/*} GOARCH=${platform#*/} CGO_ENABLED=0 go build -trimpath -o /dev/null ./cmd/kubectl-semmoe || complain "cmd/kubectl-semmoe does not compile for $platform"
done

# The project speaks of itself alone.
words=$(git grep -nIwE 'TODO|FIXME|XXX' -- ':!*.sum' ':!*testdata*' ':!internal/tools/verify.sh' || true)
[ -z "$words" ] || complain "unfinished work: $words"
[ "$failed" = 0 ] && echo "verify: generated files, modules, format and lint are in order"
exit "$failed"
