#!/usr/bin/env bash
# load.sh FILE... : loads image tars into every node that runs. A tag that is there already is replaced; pods that run
# keep what they have.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[ $# -gt 0 ] || die "usage: load.sh FILE..."
loaded=0
for i in 1 2; do
  [ -n "$(node_pid $i)" ] || continue
  for file in "$@"; do
    # From standard input: the node does not see files below the machine's /run and /dev/shm.
    "$here/in-node.sh" $i ctr -n k8s.io images import --local - <"$file" >/dev/null || die "$file was not loaded into node n$i"
    say "$file is loaded into node n$i"
  done
  loaded=$((loaded + 1))
done
[ $loaded -gt 0 ] || die "no node is running: start the cluster by up.sh"
