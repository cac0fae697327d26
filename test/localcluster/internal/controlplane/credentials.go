// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/test/localcluster/pki"
)

// Kubeconfig returns the path of the administrator's kubeconfig for clients inside the network namespace, which connect
// to Address.
func Kubeconfig(dir string) string { return filepath.Join(dir, "pki", "admin.kubeconfig") }

// OutsideKubeconfig returns the path of the administrator's kubeconfig for clients outside the network namespace, which
// connect to the address that was passed to WriteCredentials.
func OutsideKubeconfig(dir string) string { return filepath.Join(dir, "kubeconfig") }

// WriteCredentials creates the keys, certificates and kubeconfigs of a new control plane below dir. The API server is
// https://Address:SecurePort inside the network namespace and https://outside (127.0.0.1 with a port) outside it.
func WriteCredentials(dir, outside string) error {
	keys := filepath.Join(dir, "pki")
	if err := os.MkdirAll(keys, 0o700); err != nil {
		return err
	}
	authority, err := pki.NewAuthority("localcluster")
	if err != nil {
		return err
	}
	if err := authority.Write(keys, "ca"); err != nil {
		return err
	}
	server, err := authority.Server("kube-apiserver",
		[]net.IP{net.ParseIP(Address), net.ParseIP(kubernetesService), net.IPv4(127, 0, 0, 1)},
		[]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"})
	if err != nil {
		return err
	}
	if err := server.Write(keys, "apiserver"); err != nil {
		return err
	}
	tokens, err := pki.ServiceAccountKey()
	if err != nil {
		return err
	}
	if err := tokens.Write(keys, "serviceaccount"); err != nil {
		return err
	}
	inside := fmt.Sprintf("https://%s:%d", Address, SecurePort)
	for _, c := range []struct {
		path, server, user string
		groups             []string
	}{
		{Kubeconfig(dir), inside, "admin", []string{"system:masters"}},
		{OutsideKubeconfig(dir), "https://" + outside, "admin", []string{"system:masters"}},
		{filepath.Join(keys, controllerManager+".kubeconfig"), inside, "system:kube-controller-manager", nil},
		{filepath.Join(keys, scheduler+".kubeconfig"), inside, "system:kube-scheduler", nil},
	} {
		pair, err := authority.Client(c.user, c.groups...)
		if err != nil {
			return err
		}
		if err := pki.WriteKubeconfig(c.path, c.server, authority.Cert, pair); err != nil {
			return err
		}
	}
	return nil
}
