package pki

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// TestHandshake lets a client and a server prove themselves to each other.
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
func handshake(authority *Authority, server, client Pair, name string) (subject x509Name, err error) {
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
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s := tls.Server(a, &tls.Config{Certificates: []tls.Certificate{serverPair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool})
	c := tls.Client(b, &tls.Config{Certificates: []tls.Certificate{clientPair}, RootCAs: pool, ServerName: name})
	clientDone := make(chan error, 1)
	go func() {
		err := c.Handshake()
		if err != nil {
			b.Close()
		}
		clientDone <- err
	}()
	if err := s.Handshake(); err != nil {
		a.Close()
		<-clientDone
		return subject, err
	}
	peer := s.ConnectionState().PeerCertificates[0].Subject
	return x509Name{peer.CommonName, peer.Organization}, <-clientDone
}

type x509Name struct {
	CommonName   string
	Organization []string
}
