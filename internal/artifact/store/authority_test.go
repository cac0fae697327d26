package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/authority"
)

// Stores that start together share one authority, and clients get its certificate and not its key.
func TestAuthorityIsShared(t *testing.T) {
	name := types.NamespacedName{Namespace: "team-b", Name: "shared-ca"}
	authorities := make([]*authority.Authority, 6)
	var group sync.WaitGroup
	for i := range authorities {
		group.Go(func() {
			var err error
			if authorities[i], err = loadAuthority(context.Background(), api, name); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	published, err := api.CoreV1().ConfigMaps(name.Namespace).Get(t.Context(), name.Name, metav1.GetOptions{})
	if err != nil || len(published.Data) != 1 {
		t.Fatal(published.Data, err)
	}
	pool, err := cert.NewPoolFromBytes([]byte(published.Data["ca.crt"]))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range authorities {
		issued, err := a.Issue([]string{"store.example", "127.0.0.1"}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		for _, host := range []string{"store.example", "127.0.0.1"} {
			if _, err := issued.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: host}); err != nil {
				t.Errorf("%s: %v", host, err)
			}
		}
		if _, err := issued.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "other.example"}); err == nil {
			t.Error("valid for another name")
		}
	}
}

// A certificate of the user's own, which changes while the store runs.
func TestCertificateFiles(t *testing.T) {
	dir := t.TempDir()
	options := testOptions(t.TempDir())
	options.TLSCertFile, options.TLSKeyFile = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	write := func() []byte {
		certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(options.TLSKeyFile, key, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(options.TLSCertFile, certificate, 0o600); err != nil {
			t.Fatal(err)
		}
		return certificate
	}
	first := writeFile(t, string(write()))
	store := start(t, storeConfig(environment.Config), options)
	c, err := artifact.NewClient(artifact.Config{URL: "https://" + store.address, CAFile: first, TokenFile: writeFile(t, managerToken(t))})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.ListAll(t.Context()); err != nil {
		t.Error(err)
	}
	pool, err := cert.NewPoolFromBytes(write())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new certificate is served", func() bool {
		conn, err := tls.Dial("tcp", store.address, &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13})
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}
