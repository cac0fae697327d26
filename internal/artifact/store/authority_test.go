// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/test/poll"
)

// Stores that start at the same time share one CA. Clients get its certificate, but not its key.
func TestAuthorityIsShared(t *testing.T) {
	name := types.NamespacedName{Namespace: "team-b", Name: "shared-ca"}
	authorities := make([]*certs.Authority, 6)
	var group sync.WaitGroup
	for i := range authorities {
		group.Go(func() {
			var err error
			if authorities[i], _, err = loadAuthority(context.Background(), api, name); err != nil {
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
			t.Error("the certificate is valid for a different name")
		}
	}
}

// The certificate is republished after it was deleted or changed, with the permissions of the store, as long as the
// Secret contains its CA.
func TestCertificateStaysPublished(t *testing.T) {
	startDefault(t, t.TempDir()) // makes the authority
	name := testOptions("").Authority
	clients, err := kubernetes.NewForConfig(storeConfig(environment.Config))
	if err != nil {
		t.Fatal(err)
	}
	_, certificate, err := loadAuthority(t.Context(), clients, name)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { keepPublished(ctx, clients, name, certificate, 10*time.Millisecond) })
	defer group.Wait()
	defer stop()
	maps := api.CoreV1().ConfigMaps(name.Namespace)
	isPublished := func() bool {
		published, err := maps.Get(t.Context(), name.Name, metav1.GetOptions{})
		return err == nil && len(published.Data) == 1 && published.Data[caKey] == certificate
	}
	if err := maps.Delete(t.Context(), name.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the deleted certificate is published", isPublished)
	changed := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name: name.Name, Labels: map[string]string{"team": "platform"}, Annotations: map[string]string{"copy": "everywhere"},
	}, Data: map[string]string{caKey: "another"}}
	if _, err := maps.Update(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the changed certificate is published", isPublished)
	stop()
	group.Wait()

	if _, err := maps.Update(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := republish(t.Context(), clients, name, "that of a store with an older authority"); err != nil {
		t.Fatal(err)
	}
	if published, err := maps.Get(t.Context(), name.Name, metav1.GetOptions{}); err != nil || published.Data[caKey] != "another" {
		t.Error("a store publishes an outdated authority", err)
	}
	if err := republish(t.Context(), clients, name, certificate); err != nil || !isPublished() {
		t.Error("the present authority is not published", err)
	}
	if published, err := maps.Get(t.Context(), name.Name, metav1.GetOptions{}); err != nil ||
		!reflect.DeepEqual(published.Labels, changed.Labels) || !reflect.DeepEqual(published.Annotations, changed.Annotations) {
		t.Error("labels or annotations of other controllers are lost", published, err)
	}
}

// Nothing is written while the published certificate is correct, not even a no-op update, which the API server would
// have to authorize, admit and audit each minute.
func TestNothingIsWrittenWhilePublished(t *testing.T) {
	startDefault(t, t.TempDir()) // makes the authority
	name := testOptions("").Authority
	config := storeConfig(environment.Config)
	var reads, writes atomic.Int64
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodGet {
				reads.Add(1)
			} else {
				writes.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	_, certificate, err := loadAuthority(t.Context(), clients, name)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := republish(t.Context(), clients, name, certificate); err != nil {
			t.Fatal(err)
		}
	}
	if reads.Load() == 0 || writes.Load() > 0 {
		t.Errorf("%d reads and %d writes, want no writes", reads.Load(), writes.Load())
	}
}

// A user-provided certificate that changes while the store runs.
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
	c, err := access.NewClient(access.Config{URL: "https://" + store.address, CAFile: first, TokenFile: writeFile(t, managerToken(t))})
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
	poll.Until(t, "the new certificate is served", func() bool {
		conn, err := tls.Dial("tcp", store.address, &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13})
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}
