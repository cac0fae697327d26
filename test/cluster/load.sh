#!/usr/bin/env bash
# load.sh FILE... : loads image tars into every running node. An existing tag is replaced; running pods keep their
# images.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[ $# -gt 0 ] || die "usage: load.sh FILE..."
loaded=0
for i in 1 2; do
  [ -n "$(node_pid $i)" ] || continue
  for file in "$@"; do
    # The tar is read from standard input because the node does not see files below the machine's /run and /dev/shm.
    "$here/in-node.sh" $i ctr -n k8s.io images import --local - <"$file" >/dev/null || die "$file was not loaded into node n$i"
    say "$file is loaded into node n$i"
  done
  loaded=$((loaded + 1))
done
[ $loaded -gt 0 ] || die "no node is running: start the cluster with up.sh"
