#!/usr/bin/env bash
# chart.sh VERSION REF OUT : packages the chart of a release into OUT. Its links name REF, the tag or commit of the release.
# REGISTRY is the registry in the name of the image; the chart of a registry installs the image of the registry.
set -euo pipefail
version=$1 ref=$2 out=$(readlink -m "$3")
cd "$(dirname "$(readlink -f "$0")")/../../.."
tag=${version//+/-} # tags of images have no plus sign
parent=$(mktemp -d)
trap 'rm -rf "$parent"' EXIT
chart=$parent/semmoe-operator
cp -r charts/semmoe-operator "$chart"
grep -rlE 'semmoe/operator/(blob/)?main/' "$chart" | xargs sed -i -E "s#semmoe/operator/(blob/)?main/#semmoe/operator/\1$ref/#g"
if [ -n "${REGISTRY:-}" ]; then
  sed -i "s|^  repository: \"\"\$|  repository: $REGISTRY/semmoe|" "$chart/values.yaml"
  grep -qx "  repository: $REGISTRY/semmoe" "$chart/values.yaml"
  cat >>"$chart/Chart.yaml" <<END
  artifacthub.io/images: |
    - name: semmoe
      image: $REGISTRY/semmoe:$tag
      platforms: [linux/amd64, linux/arm64]
END
fi
"$(internal/tools/helm/build.sh)" package "$chart" --version "${version#v}" --app-version "$tag" --destination "$out"
