#!/usr/bin/env bash
# down.sh [--keep] : stops the cluster and removes everything that it created on the machine: processes, cgroups, links,
# routes, the nft table, sysctls and the state directory. With --keep it preserves the state directory, from which up.sh
# starts the same cluster again. down.sh works after a crash of any part, and is a no-op if there is no cluster.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[ $# = 0 ] || [ "$*" = --keep ] || die "usage: down.sh [--keep]"
lock

for part in $(cgroup_parts); do
  cgroup_end "$part"
done
for link in semmoe-n1 semmoe-n2 "$bridge"; do
  ip link del "$link" 2>/dev/null || true
done
! command -v nft >/dev/null || nft delete table inet $guard 2>/dev/null || true

if [ -f "$state/restore/sysctls" ]; then
  while read -r sysctl value; do
    echo "$value" >"/proc/sys/$sysctl"
  done <"$state/restore/sysctls"
fi
if [ -f "$state/restore/directories" ]; then
  # Deepest directory first. A directory that another program now uses is kept.
  tac "$state/restore/directories" | xargs -r rmdir --ignore-fail-on-non-empty 2>/dev/null || true
fi
if [ -f "$state/restore/controllers" ]; then
  while read -r controller; do
    echo "-$controller" >"$(cgroup_mounts)/cgroup.subtree_control" || say "cgroup controller $controller stays enabled: it is in use"
  done <"$state/restore/controllers"
fi
[ "$*" = --keep ] || [ ! -f "$state/.semmoe-cluster" ] || rm -rf "$state"
rm -f "$lock_file"
say "the cluster is gone"
