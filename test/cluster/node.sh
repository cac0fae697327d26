# shellcheck shell=bash disable=SC2154 # sourced by up.sh after lib.sh, which sets the variables
# node.sh : starts nodes; sourced by up.sh. A node is one process with private mount, network, PID, UTS, IPC and cgroup
# namespaces, in which node-init.sh starts containerd, kubelet and kube-proxy. When this process ends, the kernel ends
# all its descendants and removes mounts and network with the namespaces.

# write_node_config I : writes the configuration files of node nI.
write_node_config() {
  local node=n$1 address=$network.$((10 + $1)) disk=$state/nodes/n$1
  mkdir -p "$disk"/{config,net.d,containerd,kubelet,cni,log}
  # Each pod has its own link to the node and is reached by routes. With a bridge, responses between two pods of a node
  # would bypass the node's address translation unless the machine has br_netfilter.
  cat >"$disk/net.d/10-semmoe.conflist" <<Y
{"cniVersion": "1.0.0", "name": "semmoe", "plugins": [
  {"type": "ptp", "ipMasq": false,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.$1.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}]}
Y
  cat >"$disk/config/containerd.toml" <<Y
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "cluster.local/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true  # required to start a sandbox if root lacks CAP_SYS_RESOURCE
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["$bin"]
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "$bin/runc"
SystemdCgroup = false
Y
  : >"$disk/config/resolv.conf"
  # The disk is the machine's, which may be fuller than a node's should be: images are never garbage-collected, and pods
  # are evicted only when almost no space is left. The short lease matches the controller manager's grace period.
  cat >"$disk/config/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
failCgroupV1: false
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "$pki/ca.crt"}}
authorization: {mode: Webhook}
tlsCertFile: $pki/node-$node.crt
tlsPrivateKeyFile: $pki/node-$node.key
clusterDNS: [$dns_service]
clusterDomain: cluster.local
resolvConf: $disk/config/resolv.conf
failSwapOn: false
maxPods: 100
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 200Mi, nodefs.available: 2%, imagefs.available: 2%}
nodeStatusUpdateFrequency: 3s
nodeStatusReportFrequency: 10s
nodeLeaseDurationSeconds: 12
shutdownGracePeriod: 0s
Y
  # A network namespace cannot set the machine's conntrack limits, so they are zero (unchanged).
  cat >"$disk/config/kube-proxy.yaml" <<Y
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: "$state/kube-proxy.kubeconfig"}
mode: nftables
hostnameOverride: $node
clusterCIDR: "$pod_range"
detectLocalMode: ClusterCIDR
bindAddress: $address
healthzBindAddress: $address:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
Y
}

# start_node I : starts node nI unless it runs, and connects it to the bridge.
start_node() {
  local node=n$1 address=$network.$((10 + $1))
  pki_certificate "node-$node" "/O=system:nodes/CN=system:node:$node" "IP:$address,DNS:$node"
  pki_kubeconfig "node-$node"
  if [ -z "$(node_pid "$1")" ]; then
    write_node_config "$1"
    # The link of a killed node is removed with its namespace, after a short delay.
    ip link del "semmoe-$node" 2>/dev/null || true
    start_namespaces "$1"
  fi
  # A restarted node keeps its MAC address. With a new address, traffic from the other node would be lost for up to 30
  # s, because the other node continues to send to the cached address.
  [ -d "/sys/class/net/semmoe-$node" ] ||
    ip link add "semmoe-$node" type veth peer name eth0 address "02:00:0a:59:00:1$1" netns "$(node_pid "$1")"
  ip link set "semmoe-$node" master "$bridge" up
  # Routes from the machine to pods and, through the first node, to Services.
  ip route replace "10.244.$1.0/24" via "$address" dev "$bridge"
  [ "$1" != 1 ] || ip route replace "$service_range" via "$address" dev "$bridge"
}

# start_namespaces I : starts node-init.sh in the namespaces of node nI.
start_namespaces() {
  local leaf=''
  # A v2 cgroup that delegates controllers to its children may not contain processes, so the node's processes are in a
  # child cgroup. The cgroup namespace is created first, so that the node sees its own cgroup as the root.
  [ "$(cgroup_version)" = 1 ] || leaf=$(cgroup_mounts)/semmoe-n$1/system
  # shellcheck disable=SC2016 # expanded by the inner shell
  start "n$1" unshare --cgroup bash -euc '
    [ -z "$1" ] || { mkdir "$1" && echo $$ >"$1/cgroup.procs"; }
    exec unshare --mount --net --pid --uts --ipc --fork --kill-child bash "$2/node-init.sh" "$3" "$4"
  ' - "$leaf" "$here" "$1" "$bin"
  wait_for 10 "node n$1 has its namespaces" has_node_pid "$1"
}

has_node_pid() { [ -n "$(node_pid "$1")" ]; }
