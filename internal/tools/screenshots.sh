#!/usr/bin/env bash
# screenshots.sh : renews the screenshots of the report page in docs/images with Chromium ($CHROMIUM, or the first one on the
# PATH). The page is that of a trace in the repository, so that it does not depend on the machine. Fonts do.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
browser=${CHROMIUM:-$(command -v chromium chromium-browser google-chrome | head -n 1 || true)}
if [ -z "$browser" ]; then
  echo "SKIPPED: screenshots need Chromium (set CHROMIUM to its path)"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trace=solver/testdata/tiny-32e-top4.safetensors.zst
bin/semmoe solve --trace "$trace" --ep 4 --attention dp --train-percent 50 --batch-tokens 1048576 --out "$work/plan" >/dev/null
bin/semmoe report --plan "$work/plan" --trace "$trace" --batch-tokens 1048576 --out "$work/report.html"

# shot NAME WIDTH HEIGHT SCHEME : the upper part of the page; the scheme is 0 (dark) or 1 (light).
shot() {
  local log=$work/$1.log
  # As root, Chromium does not start in its sandbox. The page is our own, and loads nothing.
  timeout 60 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" --window-size="$2,$3" \
    --blink-settings=preferredColorScheme="$4" --screenshot="$work/$1" "file://$work/report.html" >"$log" 2>&1 || true
  if ! [ -s "$work/$1" ]; then
    echo "screenshots.sh: $browser wrote no screenshot:" >&2
    tail -n 5 "$log" >&2
    exit 1
  fi
  mv "$work/$1" "docs/images/$1"
  echo "docs/images/$1: $(stat -c %s "docs/images/$1") bytes"
}
shot report.png 1000 830 1
shot report-narrow-dark.png 500 1060 0 # headless Chromium has no narrower window
