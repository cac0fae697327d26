// SPDX-License-Identifier: Apache-2.0

package managerauth_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

// TestManagersShareAnAuthority checks that managers with the same Secret are accepted by the same routers, and that
// redirects are not followed. A new Secret results in another authority, and a server certificate of the authority is
// not accepted as a manager's.
func TestManagersShareAnAuthority(t *testing.T) {
	environment, err := apiserver.Start(&envtest.Environment{})
	tier.Require(t, err)
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	clients, err := kubernetes.NewForConfig(environment.Config)
	if err != nil {
		t.Fatal(err)
	}
	secret := types.NamespacedName{Namespace: "default", Name: managerauth.SecretName}
	load := func() *managerauth.Identity {
		t.Helper()
		identity, err := managerauth.Load(t.Context(), clients, secret)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(identity.HTTP.CloseIdleConnections)
		return identity
	}
	first, second := load(), load()
	shared, err := certs.Load(t.Context(), clients, secret, "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	serving, err := shared.Issue([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := clients.CoreV1().Secrets(secret.Namespace).Delete(t.Context(), secret.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	other := load()

	router := httptest.NewUnstartedServer(http.RedirectHandler("/elsewhere", http.StatusFound))
	router.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: x509.NewCertPool()}
	if !router.TLS.ClientCAs.AppendCertsFromPEM([]byte(first.Authority)) {
		t.Fatalf("the authority is no PEM: %q", first.Authority)
	}
	router.StartTLS()
	defer router.Close()
	for name, manager := range map[string]*managerauth.Identity{"first": first, "second": second} {
		response, err := manager.HTTP.Get(router.URL)
		if err != nil {
			t.Fatalf("the %s manager: %v", name, err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusFound {
			t.Errorf("the %s manager followed the redirection: %s", name, response.Status)
		}
	}
	server := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{*serving}}}}
	for name, client := range map[string]*http.Client{"another authority": other.HTTP, "a server's certificate": server} {
		if response, err := client.Get(router.URL); err == nil {
			response.Body.Close()
			t.Errorf("%s is accepted: %s", name, response.Status)
		} else if !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
