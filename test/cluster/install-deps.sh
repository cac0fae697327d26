#!/usr/bin/env bash
# install-deps.sh : installs the non-Go dependencies of the cluster with apt as root. Without apt or root, it reports
# the missing packages.
set -euo pipefail
packages=()
# need PACKAGE COMMAND... : selects the package for installation if the command fails.
need() {
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || packages+=("$package")
}
need nftables command -v nft
need iproute2 command -v ip
need openssl command -v openssl
need util-linux command -v nsenter
need gcc command -v gcc
need libc6-dev test -e /usr/include/stdlib.h
need pkg-config command -v pkg-config
need libseccomp-dev test -e /usr/include/seccomp.h
[ ${#packages[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "install-deps.sh: missing, and only root with apt can install it: ${packages[*]}" >&2
  exit 1
fi
echo "installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends "${packages[@]}")
"${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}" >/dev/null; }
