#!/usr/bin/env bash
# lose-node.sh I : a power failure of node nI: all that runs in it ends at once, and its disk stays. up.sh brings it back.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[[ $# = 1 && $1 =~ ^[12]$ ]] || die "usage: lose-node.sh 1|2"
pid=$(node_pid "$1")
[ -n "$pid" ] || die "node n$1 is not running"
kill -KILL "$pid"
