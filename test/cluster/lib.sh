# shellcheck shell=bash disable=SC2034 # the sourcing scripts use the variables
# The scripts never read from a file which processes run: each part of the cluster lives in a cgroup semmoe-<part>. Even
# after a crash of all scripts, the next up.sh or down.sh finds every process.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
repository=$(readlink -m "$here/../..")

# CLUSTER_STATE is the directory of the cluster: certificates, logs, etcd data, disks of the nodes. down.sh deletes it.
CLUSTER_STATE=$(readlink -m "${CLUSTER_STATE:-$repository/bin/cluster-state}")
state=$CLUSTER_STATE
pki=$state/pki
export KUBECONFIG=$state/admin.kubeconfig

# Names and addresses are fixed, so a machine runs one cluster at a time. lock enforces this.
lock_file=/run/semmoe-cluster.lock
bridge=semmoe0
guard=semmoe-cluster          # nft table
network=10.89.0               # the bridge's /24: .1 the host, .11 node n1, .12 node n2
api_address=$network.1
api_port=6443
etcd_client=http://127.0.0.1:23790
etcd_peer=http://127.0.0.1:23800
pod_range=10.244.0.0/16       # node nI has 10.244.I.0/24
service_range=10.96.0.0/16
api_service=10.96.0.1
dns_service=10.96.0.10

# kubectl, the nodes and the API server must connect without the machine's proxy.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

started=${EPOCHREALTIME/[.,]/}
say() { # prints the message with the seconds since the start to standard error
  local tenths=$(((${EPOCHREALTIME/[.,]/} - started) / 100000))
  printf '[%4d.%d s] %s\n' $((tenths / 10)) $((tenths % 10)) "$*" >&2
}
die() {
  say "FAILED: $*"
  exit 1
}
set -o errtrace
trap 'say "FAILED: ${BASH_SOURCE[0]##*/} line $LINENO: $BASH_COMMAND"' ERR

# wait_for SECONDS WHAT COMMAND... : polls five times a second.
wait_for() {
  local limit=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || die "$what: timed out after $limit s; logs are in $state/log"
    sleep 0.2
  done
  say "$what"
}

require_root() { [ "$(id -u)" = 0 ] || die "$(basename "$0") must run as root"; }

# lock : ensures that only one script at a time changes the cluster of this machine, and that the cluster belongs to one
# state directory. If a cluster was killed, for example with the session that started it, lock removes its remains from
# the machine.
lock() {
  local owner
  while :; do
    exec 9>>"$lock_file"
    flock --wait 10 9 || die "another script is starting or ending the cluster of this machine (it holds $lock_file)"
    # down.sh deletes the lock file, and a lock on a deleted file excludes no other process.
    [ "$(stat -L -c %i /proc/self/fd/9)" = "$(stat -c %i "$lock_file" 2>/dev/null)" ] || continue
    owner=$(<"$lock_file")
    [ -n "$owner" ] && [ "$owner" != "$state" ] || return 0
    ! cluster_runs ||
      die "this machine runs one cluster at a time, and the cluster of $owner is up; stop it with: CLUSTER_STATE=$owner $here/down.sh"
    say "nothing of the cluster of $owner runs any more: taking away what it left on the machine"
    exec 9>&-
    CLUSTER_STATE=$owner "$here/down.sh" --keep
  done
}

# ---- cgroups ----

# cgroup_version : prints 1 if the memory controller is bound to a separate hierarchy, as on older or hybrid machines.
cgroup_version() { awk '$3 == "cgroup" && $4 ~ /(^|,)memory(,|$)/ { v1 = 1 } END { print v1 ? 1 : 2 }' /proc/self/mounts; }

# cgroup_mounts : prints the mount point of each v1 hierarchy, or of the v2 hierarchy.
cgroup_mounts() {
  local type=cgroup
  [ "$(cgroup_version)" = 1 ] || type=cgroup2
  awk -v type=$type '$3 == type { print $2 }' /proc/self/mounts
}

# cgroup_dirs PART : prints the existing cgroups of the part.
cgroup_dirs() {
  local mount
  for mount in $(cgroup_mounts); do
    [ ! -d "$mount/semmoe-$1" ] || echo "$mount/semmoe-$1"
  done
}

# cgroup_parts : prints the parts of the cluster that have cgroups.
cgroup_parts() {
  local mount
  for mount in $(cgroup_mounts); do
    find "$mount" -mindepth 1 -maxdepth 1 -type d -name 'semmoe-*' -printf '%f\n'
  done | sed 's/^semmoe-//' | sort -u
}

# cgroup_pids PART : prints the process IDs of the part, including its pods.
cgroup_pids() {
  local dir
  for dir in $(cgroup_dirs "$1"); do
    find "$dir" -name cgroup.procs -exec cat {} + 2>/dev/null || true # pods may start and end during the search
  done | sort -nu
}

# cluster_runs : succeeds if any part of a cluster has a process.
cluster_runs() {
  local part
  for part in $(cgroup_parts); do
    [ -z "$(cgroup_pids "$part")" ] || return 0
  done
  return 1
}

# cgroup_join PART : moves the calling shell into the part's cgroups, directly below the root of each hierarchy.
cgroup_join() {
  local mount file
  for mount in $(cgroup_mounts); do
    mkdir -p "$mount/semmoe-$1"
    # A v1 cpuset accepts no process before its processors and memory nodes are set.
    for file in cpuset.cpus cpuset.mems; do
      [ ! -w "$mount/semmoe-$1/$file" ] || [ "$(cgroup_version)" = 2 ] || cat "$mount/$file" >"$mount/semmoe-$1/$file"
    done
    echo "$BASHPID" >"$mount/semmoe-$1/cgroup.procs"
  done
}

# cgroup_end PART : kills all processes in the part's cgroups and removes the cgroups.
cgroup_end() {
  local pids dir end=$((SECONDS + 20))
  while pids=$(cgroup_pids "$1") && [ -n "$pids" ]; do
    [ "$SECONDS" -lt "$end" ] || die "processes of $1 do not end: ${pids//$'\n'/ }"
    # shellcheck disable=SC2086 # one word for each process
    kill -KILL $pids 2>/dev/null || true
    sleep 0.1
  done
  for dir in $(cgroup_dirs "$1"); do
    # A terminating process keeps its cgroup for a moment.
    until find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null || [ ! -d "$dir" ]; do
      [ "$SECONDS" -lt "$end" ] || die "cgroup $dir cannot be removed"
      sleep 0.1
    done
  done
}

# start PART COMMAND... : runs the command detached in the part's cgroup, unless the part already runs. A killed node
# must not start with its old cgroups: before it is ready, the kubelet would spend three seconds on each dead pod.
start() {
  local part=$1
  shift
  [ -z "$(cgroup_pids "$part")" ] || return 0
  cgroup_end "$part"
  (
    cgroup_join "$part"
    exec setsid "$@"
  ) >>"$state/log/$part.log" 2>&1 </dev/null 9>&- &
}

# node_pid I : prints the host process ID of PID 1 of node nI, or nothing if the node is down.
node_pid() {
  local pid
  for pid in $(cgroup_pids "n$1"); do
    # The process has two IDs: one in this namespace, and 1 in the node's namespace. Processes of pods have three.
    ! awk '/^NSpid:/ && NF == 3 && $3 == 1 { found = 1 } END { exit !found }' "/proc/$pid/status" 2>/dev/null || echo "$pid"
  done
}
