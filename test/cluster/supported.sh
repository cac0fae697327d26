#!/usr/bin/env bash
# supported.sh : exits with 0 if this machine can run the cluster. Otherwise it prints the reason in one line and exits
# with 1. It tries each required operation in temporary namespaces, which leave no changes.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
no() {
  echo "this machine cannot run the cluster: $*"
  exit 1
}

[ "$(uname -s)" = Linux ] || no "it runs $(uname -s), not Linux"
[ "$(id -u)" = 0 ] || no "it needs root"
for tool in ip nft openssl nsenter unshare flock setsid; do
  command -v $tool >/dev/null || no "$tool is missing (test/cluster/install-deps.sh installs it)"
done

if [ "$(cgroup_version)" = 1 ]; then
  for controller in cpu cpuacct cpuset memory devices freezer pids; do
    awk -v c=$controller '$3 == "cgroup" && $4 ~ "(^|,)" c "(,|$)" { found = 1 } END { exit !found }' /proc/self/mounts ||
      no "it has cgroup v1 without controller $controller"
  done
else
  root=$(cgroup_mounts)
  [[ -n $root && $(wc -l <<<"$root") = 1 ]] || no "cgroup2 is not mounted once, but at: ${root//$'\n'/ }"
  for controller in cpu cpuset memory pids; do
    grep -qw $controller "$root/cgroup.controllers" || no "it has cgroup v2 without controller $controller at $root"
    # Only the machine's root cgroup may both contain processes and delegate controllers. It is the only cgroup without
    # a cgroup.type file.
    grep -qw $controller "$root/cgroup.subtree_control" || [ ! -e "$root/cgroup.type" ] || ! grep -q . "$root/cgroup.procs" ||
      no "cgroup controller $controller is not delegated to children of $root, as in a container with a private cgroup namespace"
  done
fi
for mount in $(cgroup_mounts); do
  mkdir "$mount/semmoe-try-$$" 2>/dev/null || no "it does not allow cgroups to be created in $mount"
  rmdir "$mount/semmoe-try-$$"
done

# try WHAT COMMAND ARGUMENT... : runs the command in new namespaces, so that no changes remain.
try() {
  local output
  output=$(unshare --cgroup --mount --net --pid --uts --ipc --fork --kill-child bash -euc "$2" - "${@:3}" 2>&1) ||
    no "$1: $(head -1 <<<"$output")"
}
try "namespaces are refused" 'mount --make-rprivate /; mount -t proc proc /proc; mount -t sysfs sysfs /sys; hostname try'
# An overlay cannot be created on every file system, for example not on another overlay, so the location of the nodes'
# disks is tested.
disk=$state
until [ -d "$disk" ]; do
  disk=$(dirname "$disk")
done
# shellcheck disable=SC2016 # expanded by the inner shell
try "overlay file systems are refused at $disk" '
  mount --make-rprivate /
  directory=$(mktemp -d -p "$1")
  trap "umount \"$directory/merged\" 2>/dev/null || true; rm -rf \"$directory\"" EXIT
  mkdir "$directory"/{lower,upper,work,merged}
  mount -t overlay overlay -o "lowerdir=$directory/lower,upperdir=$directory/upper,workdir=$directory/work" "$directory/merged"
' "$disk"
try "links are refused" 'ip link add try0 type bridge; ip link add try1 type veth peer name try2; ip link set try1 master try0'
try "nftables is refused" 'nft -f - <<N
table ip t {
  map services { type ipv4_addr . inet_proto . inet_service : verdict; }
  chain post { type nat hook postrouting priority srcnat; masquerade fully-random; }
  chain pre { type nat hook prerouting priority dstnat; ip daddr . meta l4proto . th dport vmap @services; fib daddr type local accept; }
}
N'
