// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// TestHandshake verifies mutual TLS authentication of a client and a server.
func TestHandshake(t *testing.T) {
	authority, err := NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	server, err := authority.Server("server", []net.IP{net.IPv4(10, 0, 0, 1)}, []string{"server.test"})
	if err != nil {
		t.Fatal(err)
	}
	client, err := authority.Client("user", "group-a", "group-b")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := WriteKubeconfig(path, "https://10.0.0.1:6443", authority.Cert, client); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	for name, ok := range map[string]bool{"10.0.0.1": true, "server.test": true, "other.test": false} {
		user, err := handshake(authority, server, Pair{config.CertData, config.KeyData}, name)
		if (err == nil) != ok {
			t.Errorf("%s: error %v, want success %v", name, err, ok)
		}
		if ok && (user.CommonName != "user" || len(user.Organization) != 2) {
			t.Errorf("%s: the server sees %v", name, user)
		}
	}
	stranger, err := NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := stranger.Client("user")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := handshake(authority, server, foreign, "server.test"); err == nil {
		t.Error("the server accepts a client of another authority")
	}
}

// handshake returns the client's name as the server has verified it.
func handshake(authority *Authority, server, client Pair, name string) (subject subjectName, err error) {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority.Cert)
	serverPair, err := tls.X509KeyPair(server.Cert, server.Key)
	if err != nil {
		return subject, err
	}
	clientPair, err := tls.X509KeyPair(client.Cert, client.Key)
	if err != nil {
		return subject, err
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{serverPair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	})
	if err != nil {
		return subject, err
	}
	defer listener.Close()
	clientDone := make(chan error, 1)
	go func() {
		connection, err := tls.Dial("tcp", listener.Addr().String(), &tls.Config{
			Certificates: []tls.Certificate{clientPair}, RootCAs: pool, ServerName: name,
		})
		if err == nil {
			err = connection.Close()
		}
		clientDone <- err
	}()
	connection, err := listener.Accept()
	if err != nil {
		return subject, err
	}
	defer connection.Close()
	accepted := connection.(*tls.Conn)
	err = errors.Join(accepted.Handshake(), <-clientDone)
	if err == nil {
		peer := accepted.ConnectionState().PeerCertificates[0].Subject
		subject = subjectName{peer.CommonName, peer.Organization}
	}
	return subject, err
}

// subjectName contains the fields of a certificate's subject that Kubernetes uses.
type subjectName struct {
	CommonName   string
	Organization []string
}
