package connectproxy_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/semmoe/operator/test/connectproxy"
)

// A client reaches a server by TLS from end to end; an address without a server is an error, and so is any method but CONNECT.
func TestTunnels(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "inside") }))
	defer server.Close()
	gone := httptest.NewTLSServer(nil)
	gone.Close()
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
		t.Errorf("answer %q, %v", body, err)
	}
	if _, err := client.Get(gone.URL); err == nil {
		t.Error("a server that is gone answers")
	}
	response, err = http.Get(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %s", response.Status)
	}
}
