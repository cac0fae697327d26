// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// TestPodClient checks that the manager reaches engines with TLS without their authority, and follows no redirect.
func TestPodClient(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/elsewhere" {
			http.Redirect(w, r, "/version", http.StatusFound)
		}
	}))
	defer server.Close()
	client := podClient()
	defer client.CloseIdleConnections()
	response, err := client.Get(server.URL + "/version")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response, err := client.Get(server.URL + "/elsewhere"); err == nil {
		if response.Body.Close(); response.Request.URL.Path != "/elsewhere" {
			t.Error("a redirect is followed")
		}
	}
}
