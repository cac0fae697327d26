#!/usr/bin/env bash
# proof.sh : verifies that the running cluster has the features on which the tests rely. It exits with 1 at the first
# failure.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
require_root
[ -n "$(node_pid 1)" ] || die "no cluster is running: start it with up.sh"
bin=$("$here/build.sh")
kubectl() { "$bin/kubectl" -n proof "$@"; }
in_pod() { kubectl exec -q "$1" -- /probe "${@:2}"; }

# expect WHAT TEXT COMMAND... : waits up to 20 s until the command's output contains the text. Names and endpoints
# follow a change, and logs follow a pod's start, with a delay.
expect() {
  local what=$1 text=$2 output end=$((SECONDS + 20))
  shift 2
  until output=$("$@" 2>&1 || true) && [[ $output == *"$text"* ]]; do
    [ "$SECONDS" -lt "$end" ] || die "$what: want '$text', got: $output"
    sleep 0.2
  done
  say "ok  $what"
}

# clean true|false : removes the processes and objects of this script. The argument selects whether it waits for the
# deletion.
clean() {
  # shellcheck disable=SC2046 # one word for each process
  kill $(jobs -p) 2>/dev/null || true
  kubectl delete namespace/proof persistentvolume/proof --ignore-not-found --wait="$1" >/dev/null 2>&1 || true
}
clean true # remains of an interrupted run
trap 'clean false' EXIT

nodes=$(kubectl get nodes -o name | wc -l)
gpus=$(kubectl get node n1 -o 'jsonpath={.status.capacity.nvidia\.com/gpu}')
disk=$state/proof
rm -rf "$disk"
mkdir -p "$disk"
CGO_ENABLED=0 go build -C "$repository" -buildvcs=false -ldflags "-s -w" -o "$disk/probe" ./test/cluster/probe
go run -C "$repository/internal/tools" -buildvcs=false ./image/cmd/mkimage \
  --binary "$disk/probe" --name semmoe-probe:1 --out "$disk/probe.tar" >/dev/null
"$here/load.sh" "$disk/probe.tar"
sed "s|DIRECTORY|$disk|; s|REPLICAS|$((nodes + 1))|; s|GPUS|$gpus|" "$here/manifests/proof.yaml" | kubectl apply -f - >/dev/null

kubectl wait --for=condition=Ready pod/web pod/client --timeout=60s >/dev/null
say "ok  pods with init container, readiness probe, volumes; a restricted pod"
kubectl wait --for=condition=Complete job/job --timeout=60s >/dev/null
say "ok  Job"
expect "logs" "serving v1" kubectl logs web
expect "exec, ConfigMap volume" from-configmap in_pod web read /text/text
expect "emptyDir from an init container" from-init-container in_pod web read /scratch/text
in_pod web write /disk/text from-pod
expect "hostPath volume is the machine's directory" from-pod cat "$disk/text"
expect "immutable ConfigMap" immutable kubectl patch configmap text -p '{"data":{"text":"changed"}}'

service=$(kubectl get service web -o jsonpath='{.spec.clusterIP}')
pod=$(kubectl get pod web -o jsonpath='{.status.podIP}')
expect "ClusterIP from another pod" "web v1" in_pod client get "http://$service/"
expect "ClusterIP from the pod itself" "web v1" in_pod web get "http://$service/"
expect "ClusterIP from the machine" "web v1" "$disk/probe" get "http://$service/"
expect "pod address from the machine" "web v1" "$disk/probe" get "http://$pod:8080/"
expect "short name" "web v1" in_pod client get http://web/
expect "full name" "web v1" in_pod client get http://web.proof.svc.cluster.local/
expect "API server as proxy" "web v1" kubectl get --raw /api/v1/namespaces/proof/pods/web:8080/proxy/
# The forwarded port represents any other port on which the machine listens.
"$bin/kubectl" -n proof port-forward --address $api_address pod/web 18080:8080 >/dev/null 2>&1 &
expect "port-forward" "web v1" "$disk/probe" get http://$api_address:18080/
! in_pod client get http://$api_address:18080/ >/dev/null 2>&1 || die "a pod reaches a port of the machine"
say "ok  no pod reaches other ports of the machine"

kubectl rollout status statefulset/set --timeout=60s >/dev/null
expect "name of a StatefulSet pod" "set-1 v1" in_pod client get http://set-1.set:8080/
kubectl set env statefulset/set VERSION=v2 >/dev/null
kubectl rollout status statefulset/set --timeout=90s >/dev/null
for i in 0 1; do
  expect "name of rolled StatefulSet pod $i" "set-$i v2" in_pod client get http://set-$i.set:8080/
done

expect "GPUs: as many pods run as nodes" "$nodes" kubectl get deployment gpu -o jsonpath='{.status.readyReplicas}'
expect "GPUs: one more waits" "Insufficient nvidia.com/gpu" kubectl get pods -l app=gpu -o jsonpath='{.items[*].status.conditions[*].message}'
# The kubelet updates the node's status at least every 10 s, and must keep fields that it did not set.
heartbeat() { kubectl get node n1 -o jsonpath='{.status.conditions[?(@.type=="Ready")].lastHeartbeatTime}'; }
before=$(heartbeat)
changed() { [ "$(heartbeat)" != "$before" ]; }
wait_for 30 "ok  the kubelet updated the node's status" changed
expect "GPUs: still advertised" "$gpus" kubectl get node n1 -o 'jsonpath={.status.allocatable.nvidia\.com/gpu}'
say "all checks passed on $nodes node(s)"
