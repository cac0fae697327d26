package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/semmoe/operator/internal/artifact"
)

// Stores that start together share one authority, and clients get its certificate and not its key.
func TestAuthorityIsShared(t *testing.T) {
	name := types.NamespacedName{Namespace: "team-b", Name: "shared-ca"}
	authorities := make([]*authority, 6)
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
		issued, err := (&issuer{authority: a, hosts: []string{"store.example", "127.0.0.1"}}).get(nil)
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

func TestParseAuthority(t *testing.T) {
	name := types.NamespacedName{Namespace: "a", Name: "b"}
	good, err := newAuthority(name, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	other, err := newAuthority(name, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	expired, err := newAuthority(name, time.Now().Add(-authorityLifetime-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	a, err := parseAuthority(good)
	if err != nil {
		t.Fatal(err)
	}
	issued, err := a.issue([]string{"x"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	leafKey, err := keyutil.MarshalPrivateKeyToPEM(issued.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf := pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: issued.Certificate[0]})
	secret := func(certificate, key []byte) *corev1.Secret {
		return &corev1.Secret{Data: map[string][]byte{"tls.crt": certificate, "tls.key": key}}
	}
	cases := map[string]struct {
		secret *corev1.Secret
		want   string
	}{
		"empty":                 {secret(nil, nil), "tls.crt"},
		"no key":                {secret(good.Data["tls.crt"], nil), "tls.key"},
		"key of another":        {secret(good.Data["tls.crt"], other.Data["tls.key"]), "do not belong together"},
		"a server's":            {secret(leaf, leafKey), "not a certificate authority"},
		"expired":               {expired, "expired on"},
		"nonsense, certificate": {secret([]byte("x"), good.Data["tls.key"]), "tls.crt"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if _, err := parseAuthority(tc.secret); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestCertificateIsRenewed(t *testing.T) {
	secret, err := newAuthority(types.NamespacedName{Namespace: "a", Name: "b"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a, err := parseAuthority(secret)
	if err != nil {
		t.Fatal(err)
	}
	old, err := a.issue([]string{"x"}, time.Now().Add(-certificateLifetime*3/4))
	if err != nil {
		t.Fatal(err)
	}
	source := &issuer{authority: a, hosts: []string{"x"}, current: old}
	renewed, err := source.get(nil)
	if err != nil || renewed == old {
		t.Fatalf("not renewed in its last quarter: %v", err)
	}
	if again, err := source.get(nil); err != nil || again != renewed {
		t.Errorf("renewed without need: %v", err)
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
