# shellcheck shell=bash disable=SC2154 # sourced by up.sh after lib.sh, which sets the variables
# control-plane.sh : starts etcd, API server, controller manager and scheduler as plain processes of the machine;
# sourced by up.sh.

start_control_plane() {
  # Without fsync, because the cluster need not survive a power failure.
  start etcd "$bin/etcd" --name semmoe --data-dir "$state/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls "$etcd_client" --advertise-client-urls "$etcd_client" \
    --listen-peer-urls "$etcd_peer" --initial-advertise-peer-urls "$etcd_peer" --initial-cluster semmoe="$etcd_peer"

  start kube-apiserver "$bin/kube-apiserver" \
    --etcd-servers="$etcd_client" --bind-address="$api_address" --advertise-address="$api_address" --secure-port="$api_port" \
    --service-cluster-ip-range="$service_range" --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --allow-privileged=true --enable-aggregator-routing=true --client-ca-file="$pki/ca.crt" \
    --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate="$pki/apiserver-kubelet-client.crt" --kubelet-client-key="$pki/apiserver-kubelet-client.key" \
    --requestheader-client-ca-file="$pki/ca.crt" --requestheader-allowed-names=front-proxy-client \
    --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
    --requestheader-extra-headers-prefix=X-Remote-Extra- \
    --proxy-client-cert-file="$pki/front-proxy-client.crt" --proxy-client-key-file="$pki/front-proxy-client.key"
  wait_for 120 "kube-apiserver is ready" "$bin/kubectl" get --raw /readyz

  # There is one instance of each program, so leader election is off, and no program opens a port. A lost node
  # is detected within 16 s instead of 54 s; the kubelet's lease (node.sh) is shortened accordingly. A claim that the
  # binder sees before its volume is bound after 2 s instead of 15 s.
  start kube-controller-manager "$bin/kube-controller-manager" --leader-elect=false --secure-port=0 \
    --kubeconfig="$state/kube-controller-manager.kubeconfig" --use-service-account-credentials=true \
    --service-account-private-key-file="$pki/sa.key" --root-ca-file="$pki/ca.crt" \
    --cluster-signing-cert-file="$pki/ca.crt" --cluster-signing-key-file="$pki/ca.key" \
    --service-cluster-ip-range="$service_range" --cluster-cidr="$pod_range" --allocate-node-cidrs=false \
    --node-monitor-grace-period=16s --node-monitor-period=2s --pvclaimbinder-sync-period=2s
  start kube-scheduler "$bin/kube-scheduler" --leader-elect=false --secure-port=0 \
    --kubeconfig="$state/kube-scheduler.kubeconfig"
  "$bin/kubectl" apply -f "$here/manifests/system.yaml" >/dev/null
}
