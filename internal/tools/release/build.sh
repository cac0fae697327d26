#!/usr/bin/env bash
# build.sh : builds the files of a release in dist/release: archives, bills of materials, images for amd64 and arm64, the
# chart, the manifest for Krew, and checksums. The version is that of the checkout: its tag, or a pseudo-version. An
# argument names the required version. REGISTRY is the registry in the names of the images.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
export CGO_ENABLED=0
bin=$PWD/dist/bin out=$PWD/dist/release
rm -rf "$out"
mkdir -p "$out"

# build PLATFORM PROGRAM... builds programs for a platform, as OS_ARCHITECTURE.
build() {
  local platform=$1 program suffix=
  shift
  [ "${platform%_*}" != windows ] || suffix=.exe
  for program; do
    GOOS=${platform%_*} GOARCH=${platform#*_} go build -buildvcs=true -trimpath -ldflags "-s -w" -o "$bin/$platform/$program$suffix" "./cmd/$program"
  done
}
rm -rf "$bin"
for platform in linux_amd64 linux_arm64; do build "$platform" semmoe semmoe-refengine kubectl-semmoe; done
for platform in darwin_amd64 darwin_arm64 windows_amd64; do build "$platform" kubectl-semmoe; done

version=$(go version -m "$bin/linux_amd64/semmoe" | awk '$1 == "mod" { print $3 }')
if [ -n "${1:-}" ] && [ "$version" != "$1" ]; then
  echo "release: the version of the checkout is $version, not $1: check out the tag, without changes" >&2
  exit 1
fi
tag=${version//+/-} # tags of images have no plus sign
for program in semmoe semmoe-refengine; do
  (cd internal/tools && go run ./image/cmd/mkimage --binary "$bin/linux_amd64/$program,$bin/linux_arm64/$program" \
    --name "${REGISTRY:+$REGISTRY/}$program:$tag" --version "$version" --revision "$(git rev-parse HEAD)" --out "$out/${program}_${version}_image.tar")
done
internal/tools/release/chart.sh "$version" "$(git describe --tags --exact-match 2>/dev/null || git rev-parse HEAD)" "$out"
(cd internal/tools && go run ./release --bin "$bin" --out "$out" --version "$version" --license ../../LICENSE)
ls -l "$out"
