#!/usr/bin/env bash
# licence.sh [--check]: adds the header in licence.txt to every Go file that has none, or lists these files and fails.
# make generate adds the same header to generated files.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
licence=$(<internal/tools/licence.txt)

missing=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 grep -sLxF -- "$licence" || true)
if [ "${1:-}" = --check ]; then
  [ -z "$missing" ] || { printf 'without a licence header (run internal/tools/licence.sh):\n%s\n' "$missing" >&2; exit 1; }
  exit 0
fi
for file in $missing; do
  sed -i "1i $licence\n" "$file"
done
