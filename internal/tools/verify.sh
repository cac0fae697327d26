#!/usr/bin/env bash
# verify.sh : fails, with the required action, on outdated generated files, unformatted code, untidy modules, findings of
# go vet and staticcheck, Go files without the licence header, and comments or messages that do not follow the
# vocabulary.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
# The flags of bin/semmoe, so that the build cache is shared.
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:-} -trimpath"
failed=0
complain() {
  echo "verify: $*" >&2
  failed=1
}

# Generated files: generate into the tree, and compare with the previous state.
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
generated=(config charts api docs/api.md docs/engine-releases.md docs/routes.md)
tar -cf "$before/tree.tar" "${generated[@]}"
make -s generate >/dev/null
mkdir "$before/tree"
tar -xf "$before/tree.tar" -C "$before/tree"
for path in "${generated[@]}"; do
  diff -r "$before/tree/$path" "$path" || complain "$path was outdated and has been regenerated: commit it"
done

unformatted=$(gofmt -l $(git ls-files '*.go'))
[ -z "$unformatted" ] || complain "not formatted (gofmt -w): $unformatted"
for module in . internal/tools internal/tools/helm test/kubernetes test/kubernetes/oldest test/gateway test/argocd test/browser test/leaderworkerset test/kueue test/prometheus test/cluster/coredns; do
  (cd "$module" && go mod tidy -diff >/dev/null) || complain "$module/go.mod is not tidy (go mod tidy)"
done
tools=$PWD/internal/tools
for module in . internal/tools; do # the dependencies of test/prometheus take minutes to compile: make prometheus vets it
  (cd "$module" && go vet ./...) || complain "go vet has findings in $module"
  (cd "$module" && go tool -modfile="$tools/go.mod" staticcheck ./...) || complain "staticcheck has findings in $module"
done

# Workflow files, without the optional checks by shellcheck and pyflakes, so that the result is the same on all machines.
$(go tool -n -modfile=internal/tools/go.mod actionlint) -shellcheck= -pyflakes= || complain "actionlint has findings in .github/workflows"

# Language: the words of comments and messages (internal/tools/language/vocabulary.yaml).
(cd internal/tools && go run ./language ../..) || complain "comments or messages do not follow internal/tools/language/vocabulary.yaml"

# Each Go file begins with the licence.
internal/tools/licence.sh --check || complain "Go files have no licence header"

# No unfinished work.
words=$(git grep -nIwE 'TODO|FIXME|XXX' -- ':!*.sum' ':!*testdata*' ':!internal/tools/verify.sh' || true)
[ -z "$words" ] || complain "unfinished work: $words"
[ "$failed" = 0 ] && echo "verify: generated files, modules, format, lint and language are in order"
exit "$failed"
