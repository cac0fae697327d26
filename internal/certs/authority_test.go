// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

var (
	clients kubernetes.Interface
	name    = types.NamespacedName{Namespace: "default", Name: "b"}
	day     = 24 * time.Hour
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if flag.Parse(); flag.Lookup("test.fuzz").Value.String() != "" {
		return m.Run() // fuzz targets need no API server, and every fuzz worker would start one
	}
	environment, err := apiserver.Start(&envtest.Environment{})
	if err != nil {
		return tier.ExitCode(err)
	}
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	if clients, err = kubernetes.NewForConfig(environment.Config); err != nil {
		return tier.ExitCode(err)
	}
	return m.Run()
}

func TestParse(t *testing.T) {
	now := time.Now()
	good, err := newSecret(name, "test", now)
	if err != nil {
		t.Fatal(err)
	}
	other, err := newSecret(name, "test", now)
	if err != nil {
		t.Fatal(err)
	}
	expired, err := newSecret(name, "test", now.Add(-Lifetime-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	a, err := parse(good, now)
	if err != nil {
		t.Fatal(err)
	}
	issued, err := a.Issue([]string{"x"}, now)
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
		"empty":              {secret(nil, nil), "tls.crt"},
		"no key":             {secret(good.Data["tls.crt"], nil), "tls.key"},
		"different key":      {secret(good.Data["tls.crt"], other.Data["tls.key"]), "do not belong together"},
		"server certificate": {secret(leaf, leafKey), "not the certificate of a certificate authority"},
		"expired":            {expired, "expired on"},
		"swapped":            {secret([]byte("x"), good.Data["tls.key"]), "tls.crt"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if _, err := parse(tc.secret, now); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

// TestIssuer verifies that a certificate is renewed in the last third of its lifetime, and immediately if the CA
// changes.
func TestIssuer(t *testing.T) {
	now := time.Now()
	name := types.NamespacedName{Namespace: "default", Name: "issuer"}
	a, err := Load(t.Context(), clients, name, "test", now)
	if err != nil {
		t.Fatal(err)
	}
	issuer := NewIssuer("x")
	if _, err := issuer.Certificate(nil); err == nil {
		t.Error("Certificate succeeds without an authority")
	}
	issuer.Use(a)
	first, err := issuer.at(now)
	if err != nil {
		t.Fatal(err)
	}
	for after, renewed := range map[time.Duration]bool{certificateLifetime * 3 / 5: false, certificateLifetime * 3 / 4: true} {
		fresh := NewIssuer("x")
		fresh.Use(a)
		fresh.current = first
		if again, err := fresh.at(now.Add(after)); err != nil || (again != first) != renewed {
			t.Errorf("after %v: renewed is %t, want %t: %v", after, again != first, renewed, err)
		}
	}
	issuer.Use(a)
	if again, err := issuer.at(now); err != nil || again != first {
		t.Errorf("the certificate changes although the authority does not: %v", err)
	}
	later := now.Add(Lifetime * 3 / 4)
	b, err := Renew(t.Context(), clients, name, "test", later)
	if err != nil {
		t.Fatal(err)
	}
	issuer.Use(b)
	if again, err := issuer.at(now); err != nil || again == first {
		t.Errorf("the certificate of the previous authority is still used: %v", err)
	}
}

// TestRenew verifies that processes that renew at the same time use the same CA, and that the new bundle verifies
// certificates of both CAs.
func TestRenew(t *testing.T) {
	begin := time.Now()
	name := types.NamespacedName{Namespace: "default", Name: "renew"}
	old, err := Load(t.Context(), clients, name, "test", begin)
	if err != nil {
		t.Fatal(err)
	}
	young, err := Renew(t.Context(), clients, name, "test", begin.Add(Lifetime/2))
	if err != nil || !young.certificates[0].Equal(old.certificates[0]) {
		t.Fatalf("renewed at half of its lifetime: %v", err)
	}
	due := begin.Add(Lifetime*2/3 + day)
	before, err := old.Issue([]string{"x"}, due.Add(-day))
	if err != nil {
		t.Fatal(err)
	}
	renewed := make([]*Authority, 4)
	var group sync.WaitGroup
	for i := range renewed {
		group.Go(func() {
			var err error
			if renewed[i], err = Renew(context.Background(), clients, name, "test", due); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	stored, err := clients.CoreV1().Secrets(name.Namespace).Get(t.Context(), name.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := cert.NewPoolFromBytes(stored.Data["tls.crt"])
	if err != nil {
		t.Fatal(err)
	}
	last, err := Load(t.Context(), clients, name, "test", due)
	if err != nil {
		t.Fatal(err)
	}
	after, err := last.Issue([]string{"x"}, due)
	if err != nil {
		t.Fatal(err)
	}
	for i, a := range renewed {
		if !a.certificates[0].Equal(last.certificates[0]) {
			t.Errorf("process %d uses an authority that was overwritten", i)
		}
	}
	for which, leaf := range map[string]*x509.Certificate{"before": before.Leaf, "after": after.Leaf} {
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "x", CurrentTime: due}); err != nil {
			t.Errorf("the certificate issued %s the renewal is not trusted: %v", which, err)
		}
	}
	much := due.Add(Lifetime / 2)
	third, err := Renew(t.Context(), clients, name, "test", much)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range third.certificates {
		if much.After(c.NotAfter) {
			t.Errorf("an authority that expired on %s stays in the bundle", c.NotAfter)
		}
	}
}
