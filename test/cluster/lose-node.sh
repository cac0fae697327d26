#!/usr/bin/env bash
# lose-node.sh I : simulates a power failure of node nI: all its processes end immediately, and its disk is kept. up.sh
# restarts the node.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[[ $# = 1 && $1 =~ ^[12]$ ]] || die "usage: lose-node.sh 1|2"
pid=$(node_pid "$1")
[ -n "$pid" ] || die "node n$1 is not running"
kill -KILL "$pid"
