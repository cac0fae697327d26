#!/usr/bin/env bash
# in-node.sh I COMMAND... : runs a command inside node nI, for example: in-node.sh 1 ctr -n k8s.io images ls
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[[ $# -ge 2 && $1 =~ ^[12]$ ]] || die "usage: in-node.sh 1|2 COMMAND..."
pid=$(node_pid "$1")
[ -n "$pid" ] || die "node n$1 is not running"
shift
PATH=$("$here/build.sh"):$PATH
export CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1 # ctr's, on a machine with cgroup v1
unset KUBECONFIG
exec nsenter -t "$pid" -m -u -i -n -p -C -- "$@"
