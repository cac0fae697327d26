# shellcheck shell=bash disable=SC2154 # sourced by up.sh after lib.sh, which sets the variables
# pki.sh : creates the certificate authority of the cluster and a certificate for each part; sourced by up.sh.

# quietly COMMAND... : runs the command and shows its standard error only if it fails, because openssl logs its progress
# there.
quietly() { "$@" 2>"$state/log/openssl.log" || die "$(<"$state/log/openssl.log")"; }

# pki_authority : creates the authority and the key pair of service-account tokens. The last file is the marker that all
# exist.
pki_authority() {
  mkdir -p "$pki"
  [ ! -f "$pki/sa.pub" ] || return 0
  quietly openssl ecparam -name prime256v1 -genkey -noout -out "$pki/ca.key"
  quietly openssl req -x509 -new -key "$pki/ca.key" -days 3650 -subj /CN=semmoe-cluster -out "$pki/ca.crt" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
  quietly openssl ecparam -name prime256v1 -genkey -noout -out "$pki/sa.key"
  quietly openssl ec -in "$pki/sa.key" -pubout -out "$pki/.sa.pub"
  mv "$pki/.sa.pub" "$pki/sa.pub"
}

# pki_certificate NAME SUBJECT [NAMES] : creates a certificate for a client or, with alternative names, for a server.
pki_certificate() {
  local draft=$pki/.$1
  [ ! -f "$pki/$1.crt" ] || return 0
  printf 'extendedKeyUsage=clientAuth,serverAuth\n%s\n' "${3:+subjectAltName=$3}" >"$draft.ext"
  quietly openssl ecparam -name prime256v1 -genkey -noout -out "$pki/$1.key"
  quietly openssl req -new -key "$pki/$1.key" -subj "$2" -out "$draft.csr"
  quietly openssl x509 -req -in "$draft.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 3650 \
    -extfile "$draft.ext" -out "$draft.crt"
  mv "$draft.crt" "$pki/$1.crt"
  rm "$draft.csr" "$draft.ext"
}

# pki_kubeconfig NAME : writes $state/NAME.kubeconfig with embedded credentials, so that the file can be copied.
pki_kubeconfig() {
  [ ! -f "$state/$1.kubeconfig" ] || return 0
  (umask 077 && cat >"$state/.$1.kubeconfig") <<Y
apiVersion: v1
kind: Config
clusters:
- name: semmoe
  cluster: {server: "https://$api_address:$api_port", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}
users:
- name: $1
  user: {client-certificate-data: $(base64 -w0 "$pki/$1.crt"), client-key-data: $(base64 -w0 "$pki/$1.key")}
contexts:
- name: semmoe
  context: {cluster: semmoe, user: $1}
current-context: semmoe
Y
  mv "$state/.$1.kubeconfig" "$state/$1.kubeconfig"
}

# pki_control_plane : creates all certificates except those of the nodes.
pki_control_plane() {
  local service=kubernetes.default.svc name
  pki_authority
  pki_certificate apiserver /CN=kube-apiserver \
    "IP:$api_address,IP:$api_service,DNS:kubernetes,DNS:kubernetes.default,DNS:$service,DNS:$service.cluster.local"
  # manifests/system.yaml binds the group to system:kubelet-api-admin. Without this role, logs and exec are forbidden.
  pki_certificate apiserver-kubelet-client /O=semmoe:kubelet-clients/CN=kube-apiserver-kubelet-client
  pki_certificate front-proxy-client /CN=front-proxy-client
  pki_certificate admin /O=system:masters/CN=admin
  for name in kube-controller-manager kube-scheduler kube-proxy; do
    pki_certificate $name /CN=system:$name
  done
  for name in admin kube-controller-manager kube-scheduler kube-proxy; do
    pki_kubeconfig $name
  done
}
