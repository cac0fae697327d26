// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
	"github.com/semmoe/operator/test/tier"
)

// certificate returns the content of a Secret with a certificate for a host, and its key.
func certificate(t *testing.T, authority *tlstest.Authority, host string) map[string][]byte {
	t.Helper()
	certFile, keyFile := authority.Files(t.TempDir(), host, time.Now().Add(time.Hour))
	return map[string][]byte{corev1.TLSCertKey: readFile(t, certFile), corev1.TLSPrivateKeyKey: readFile(t, keyFile)}
}

func readFile(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Clean(file))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestTLSAndKeys serves a model by TLS to clients with API keys. A renewed certificate and a new key need no restart.
func TestTLSAndKeys(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	authority := tlstest.NewAuthority(t)
	serving := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "serving"}, Type: corev1.SecretTypeTLS, Data: certificate(t, authority, "tiny.example")}
	keys := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "keys"}, StringData: map[string]string{"team-a": "team-a-0123456789"}}
	create(t, serving)
	create(t, keys)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.TLS = &semmoev1.RoutingTLS{SecretName: serving.Name}
		m.Spec.Routing.Auth = &semmoev1.RoutingAuth{SecretName: keys.Name}
	})
	create(t, moed)
	status := waitComplete(t, moed).Status
	if !strings.HasPrefix(status.Endpoint, "https://") {
		t.Errorf("endpoint %s", status.Endpoint)
	}
	routers := podNames(t, moed, semmoev1.ComponentRouter)
	address, err := cluster.Forward(t.Context(), namespace, moed.Name, semmoev1.ServicePort)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(readFile(t, authority.File))
	// send returns the status, and the serial number of the router's certificate.
	send := func(ctx context.Context, key string) (code int, serial string, err error) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "tiny.example"}}
		defer transport.CloseIdleConnections()
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+"/v1/completions", strings.NewReader(`{"model": "tiny", "prompt": "a", "max_tokens": 1}`))
		if err != nil {
			return 0, "", err
		}
		request.Header.Set("Content-Type", "application/json")
		if key != "" {
			request.Header.Set("Authorization", "Bearer "+key)
		}
		response, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			return 0, "", err
		}
		defer response.Body.Close()
		return response.StatusCode, response.TLS.PeerCertificates[0].SerialNumber.String(), nil
	}
	var first string
	eventually(t, waitTimeout, "a client with a key is served", func() error {
		code, serial, err := send(t.Context(), "team-a-0123456789")
		if err != nil || code != http.StatusOK {
			return fmt.Errorf("status %d: %v", code, err)
		}
		first = serial
		return nil
	})
	for _, key := range []string{"", "team-b-0123456789"} {
		if code, _, err := send(t.Context(), key); code != http.StatusUnauthorized {
			t.Errorf("with key %q: status %d, error %v", key, code, err)
		}
	}

	serving.Data, keys.StringData = certificate(t, authority, "tiny.example"), map[string]string{"team-b": "team-b-0123456789"}
	for _, secret := range []*corev1.Secret{serving, keys} {
		if err := api.Update(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, waitTimeout, "the new key and the renewed certificate are used", func() error {
		code, serial, err := send(t.Context(), "team-b-0123456789")
		if err != nil || code != http.StatusOK || serial == first {
			return fmt.Errorf("status %d, renewed %v: %v", code, serial != first, err)
		}
		return nil
	})
	if now := podNames(t, moed, semmoev1.ComponentRouter); strings.Join(now, " ") != strings.Join(routers, " ") {
		t.Errorf("request routers were restarted: %v, then %v", routers, now)
	}
}
