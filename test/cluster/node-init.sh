#!/usr/bin/env bash
# node-init.sh I BIN : PID 1 of node nI. It sees only its own processes, cgroups, network and /run. The directories with
# node state are on the node's disk and mounted at their usual paths. All other paths are the machine's file system, so
# a hostPath volume of a pod is a directory of the machine.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
index=$1 bin=$2 node=n$1 address=$network.$((10 + $1)) disk=$state/nodes/n$1
unset KUBECONFIG
export PATH=$bin:$PATH

mount_cgroups() {
  local hierarchies type options
  # Read this before /sys is mounted again, which hides the machine's cgroup mounts.
  hierarchies=$(awk -F: '$2 != "" { print $2 }' /proc/self/cgroup)
  mount -t sysfs sysfs /sys
  if [ "$1" = 2 ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
    return
  fi
  mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
  for options in $hierarchies; do
    mkdir "/sys/fs/cgroup/${options#name=}"
    type=$options
    [ "${options#name=}" = "$options" ] || type=none,$options
    mount -t cgroup -o "$type" cgroup "/sys/fs/cgroup/${options#name=}"
  done
}

# keep NAME COMMAND... : runs the command and restarts it when it ends, like a service manager.
keep() {
  local name=$1
  shift
  while :; do
    "$@" >>"$state/log/$node-$name.log" 2>&1 || true
    say "$name ended"
    sleep 1
  done &
}

hostname "$node"
version=$(cgroup_version)
mount --make-rprivate /
mount -t proc proc /proc
mount_cgroups "$version"
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$disk/kubelet" /var/lib/kubelet
mount --bind "$disk/containerd" /var/lib/containerd
mount --bind "$disk/cni" /var/lib/cni
mount --bind "$disk/net.d" /etc/cni/net.d
mount --bind "$disk/log" /var/log
mount --make-rshared / # volume mounts of the kubelet must propagate to containers

wait_for 10 "$node is linked" test -e /sys/class/net/eth0
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
# The machine does not forward traffic: kubelet and kube-proxy only need the default route to detect their own address.
ip route add default via $api_address
ip route add unreachable "10.244.$index.0/24" # for addresses of removed pods; each existing pod has its own route
other=$((3 - index))
ip route add "10.244.$other.0/24" via "$network.$((10 + other))"
echo 1 >/proc/sys/net/ipv4/ip_forward

keep containerd containerd --config "$disk/config/containerd.toml"
wait_for 60 "$node runs containerd" ctr version
for image in "$bin"/*.tar; do
  ctr -n k8s.io images import --local "$image" >/dev/null
done
keep kubelet kubelet --config="$disk/config/kubelet.yaml" --kubeconfig="$state/node-$node.kubeconfig" \
  --hostname-override="$node" --node-ip="$address" --root-dir=/var/lib/kubelet --v=1
keep kube-proxy kube-proxy --config="$disk/config/kube-proxy.yaml"
wait
