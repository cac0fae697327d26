#!/usr/bin/env bash
# up.sh [NODES] : starts a real Kubernetes cluster of one or two nodes on this machine, and prints its KUBECONFIG
# setting. The control plane runs as plain processes, and each node in private namespaces connected to a bridge.
# Repeated calls, also after a crash, start only the parts that do not run. down.sh removes the cluster.
#   CLUSTER_STATE=DIR   state directory of the cluster (default: bin/cluster-state)
#   GPUS=N              nvidia.com/gpu that each node advertises (default: 16)
#   IMAGES="FILE..."    image tars to load into every node
. "$(dirname "$(readlink -f "$0")")/lib.sh"
. "$here/pki.sh"
. "$here/control-plane.sh"
. "$here/node.sh"
nodes=${1:-1}
gpus=${GPUS:-16}
read -ra images <<<"${IMAGES:-}"

[ $# -le 1 ] || die "usage: up.sh [NODES]"
[[ $nodes =~ ^[12]$ ]] || die "NODES is '$nodes': want 1 or 2"
[[ $gpus =~ ^[0-9]{1,4}$ ]] || die "GPUS is '$gpus': want a number from 0 to 9999"
[[ $state =~ ^[A-Za-z0-9_/.@+-]+$ ]] || die "CLUSTER_STATE is '$state': want a path of letters, digits and _ / . @ + -"
[ -f "$state/.semmoe-cluster" ] || [ -z "$(ls -A "$state" 2>/dev/null)" ] ||
  die "CLUSTER_STATE is '$state': want a new or an empty directory, as down.sh deletes it"
for image in "${images[@]}"; do
  [ -r "$image" ] || die "IMAGES: $image cannot be read"
done
"$here/supported.sh"
bin=$("$here/build.sh")
lock
mkdir -p "$state"
: >"$state/.semmoe-cluster" # down.sh deletes only directories with this file
mkdir -p "$state"/{restore,log,nodes}
[ -d "$state/etcd" ] || mkdir -m 700 "$state/etcd"
echo "$state" >"$lock_file"

# ---- record the settings that down.sh restores, before any change ----

if [ ! -f "$state/restore/sysctls" ]; then # the kubelet changes these for the whole machine
  for sysctl in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    echo "$sysctl $(<"/proc/sys/$sysctl")"
  done >"$state/restore/.sysctls"
  mv "$state/restore/.sysctls" "$state/restore/sysctls"
fi
for directory in /var/lib/kubelet /var/lib/containerd /var/lib/cni /etc/cni /etc/cni/net.d; do # mount points of node-init.sh
  [ -d "$directory" ] || {
    echo "$directory" >>"$state/restore/directories"
    mkdir "$directory"
  }
done
if [ "$(cgroup_version)" = 2 ]; then
  root=$(cgroup_mounts)
  for controller in cpu cpuset hugetlb io memory pids; do
    if grep -qw $controller "$root/cgroup.controllers" && ! grep -qw $controller "$root/cgroup.subtree_control"; then
      echo $controller >>"$state/restore/controllers"
      echo +$controller >"$root/cgroup.subtree_control"
    fi
  done
fi

# ---- the bridge ----

ip link show $bridge >/dev/null 2>&1 || ip link add $bridge type bridge
ip addr replace $api_address/24 dev $bridge
ip link set $bridge up
# Of the machine's ports, pods reach only the API server. The rule matches packets, not connections, so that a test does
# not enable connection tracking in the machine's network.
nft -f - <<N
table inet $guard
delete table inet $guard
table inet $guard {
  chain input {
    type filter hook input priority 0; policy accept;
    iifname "$bridge" tcp flags & (syn | ack) == syn tcp dport != $api_port drop
  }
}
N

# ---- control plane, nodes, images ----

pki_control_plane
start_control_plane
for ((i = 1; i <= nodes; i++)); do
  start_node "$i"
done
# After a crash, a node's status is outdated for a while, so the kubelet itself must also respond.
node_ready() {
  "$bin/kubectl" get --raw "/api/v1/nodes/$1/proxy/healthz" && "$bin/kubectl" wait --for=condition=Ready "node/$1" --timeout=1s
}
for ((i = 1; i <= nodes; i++)); do
  wait_for 120 "node n$i is ready" node_ready "n$i"
  # There is no device: tests only need pods that request GPUs and a scheduler that counts them. The kubelet keeps
  # status fields that other clients add.
  "$bin/kubectl" patch node "n$i" --subresource=status --type=json -p "[
    {\"op\": \"add\", \"path\": \"/status/capacity/nvidia.com~1gpu\", \"value\": \"$gpus\"},
    {\"op\": \"add\", \"path\": \"/status/allocatable/nvidia.com~1gpu\", \"value\": \"$gpus\"}]" >/dev/null
done
[ ${#images[@]} = 0 ] || "$here/load.sh" "${images[@]}"
wait_for 120 "CoreDNS is available" "$bin/kubectl" -n kube-system wait --for=condition=Available deployment/coredns --timeout=1s
echo "export KUBECONFIG=$KUBECONFIG"
