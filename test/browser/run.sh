#!/usr/bin/env bash
# run.sh SITE : checks report pages and the documentation site in the directory SITE with Chromium ($CHROMIUM, or the first one on the
# PATH) and axe-core, which npm installs into ${XDG_CACHE_HOME:-~/.cache}/semmoe/browser-<hash>. Exit status 75: Chromium, npm or
# the package index is missing.
set -euo pipefail
site=$(realpath "${1:?usage: run.sh SITE}")
cd "$(dirname "$(readlink -f "$0")")"
missing() {
  echo "run.sh: $*" >&2
  exit 75
}
browser=${CHROMIUM:-$(command -v chromium chromium-browser google-chrome | head -n 1 || true)}
[ -n "$browser" ] || missing "Chromium is not installed (CHROMIUM is its path)"
command -v npm >/dev/null || missing "npm is not installed"

packages=${XDG_CACHE_HOME:-$HOME/.cache}/semmoe/browser-$(sha256sum package-lock.json | cut -c1-16)
if [ ! -e "$packages/installed" ]; then
  mkdir -p "$packages"
  cp package.json package-lock.json "$packages"
  npm --prefix "$packages" ci --ignore-scripts --no-audit --no-fund --silent || missing "axe-core cannot be installed"
  touch "$packages/installed"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=../..
trace=$root/solver/testdata/tiny-32e-top4.safetensors.zst
# report NAME BATCH OPTION... : the page of a plan with the options.
report() {
  local name=$1 batch=$2
  shift 2
  $root/bin/semmoe solve --trace "$trace" --train-percent 50 --batch-tokens "$batch" "$@" --out "$work/$name" >/dev/null
  $root/bin/semmoe report --plan "$work/$name" --trace "$trace" --batch-tokens "$batch" --out "$work/reports/$name.html" >/dev/null
}
mkdir "$work/reports"
report requests 1048576 --ep 4 --attention dp
report tokens 65536 --ep 8 --attention tp
report copies 65536 --ep 8 --attention dp --redundant-slots 1
CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 30m . -args -chromium "$browser" -axe "$packages/node_modules/axe-core/axe.min.js" -reports "$work/reports" -site "$site"
