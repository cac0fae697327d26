// SPDX-License-Identifier: Apache-2.0

package connectproxy_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/semmoe/operator/test/connectproxy"
	"github.com/semmoe/operator/test/ports"
)

// TestTunnels verifies that a client reaches a server with end-to-end TLS, and that a closed server and any method
// except CONNECT result in an error.
func TestTunnels(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "inside") }))
	defer server.Close()
	proxy := httptest.NewServer(connectproxy.Dial(new(net.Dialer).DialContext))
	defer proxy.Close()
	address, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	client := server.Client()
	client.Transport.(*http.Transport).Proxy = http.ProxyURL(address)
	response, err := client.Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	response.Body.Close()
	if err != nil || string(body) != "inside" {
		t.Errorf("response %q, error %v", body, err)
	}
	if _, err := client.Get("https://" + ports.Address(t)); err == nil {
		t.Error("a request to a closed server succeeded")
	}
	response, err = http.Get(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET returned status %s, want 405", response.Status)
	}
}
