// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/test/ports"
)

// managerIdentity returns the identity of a manager; each call creates another authority.
func managerIdentity(t *testing.T) *managerauth.Identity {
	t.Helper()
	made, err := managerauth.Load(t.Context(), fake.NewClientset(), types.NamespacedName{Namespace: "semmoe-system", Name: managerauth.SecretName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(made.HTTP.CloseIdleConnections)
	return made
}

// TestOnlyManagersReadObservations checks that observations and live samples are served only on the private port, to
// clients with a certificate of the managers' authority, without the API server.
func TestOnlyManagersReadObservations(t *testing.T) {
	p, _ := solved(t)
	clients, options := keeping(t, p)
	manager, stranger := managerIdentity(t), managerIdentity(t)
	options.PrivatePort, options.ManagerAuthority = ports.Reserve(t), []byte(manager.Authority)
	options.LiveSamples = livesamples.Sequences
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, clients, options) }()
	open, private := fmt.Sprintf("http://127.0.0.1:%d", options.MetricsPort), fmt.Sprintf("https://127.0.0.1:%d", options.PrivatePort)
	eventually(t, "metrics", func() bool {
		response, err := http.Get(open + "/metrics")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	anonymous := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	selfSigned, err := picker.TLSConfig("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	selfSigned.InsecureSkipVerify = true
	for path, want := range map[string]int{"/v1/observations": http.StatusOK, livesamples.CountsPath: http.StatusNoContent, livesamples.SequencesPath: http.StatusNoContent} {
		response, err := manager.HTTP.Get(private + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("GET %s as a manager: %s, want %d", path, response.Status, want)
		}
		for name, client := range map[string]*http.Client{
			"no certificate": anonymous, "another authority": stranger.HTTP,
			"a self-signed certificate": {Transport: &http.Transport{TLSClientConfig: selfSigned}},
		} {
			if response, err := client.Get(private + path); err == nil {
				body, _ := io.ReadAll(response.Body)
				response.Body.Close()
				t.Errorf("GET %s with %s: %s: %.100s", path, name, response.Status, body)
			}
		}
		response, err = http.Get(open + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusNotFound {
			t.Errorf("GET %s on the metrics port: %s, want 404", path, response.Status)
		}
	}
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the router does not end while a manager is connected")
	}
}

// TestRejectsAnInvalidManagerAuthority checks that an unreadable authority is an error at the start and does not open
// the port.
func TestRejectsAnInvalidManagerAuthority(t *testing.T) {
	p, _ := solved(t)
	clients, options := keeping(t, p)
	options.ManagerAuthority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})
	if err := Run(t.Context(), clients, options); err == nil || !strings.Contains(err.Error(), "certificate authority of the managers is invalid") {
		t.Errorf("error %v", err)
	}
}

// TestPrivatePortNeedsAnAuthority checks that the private port is not opened without an authority: an empty variable
// must not let all clients read prompts.
func TestPrivatePortNeedsAnAuthority(t *testing.T) {
	for _, authority := range []string{"", " \n"} {
		options := Options{Host: "127.0.0.1", PrivatePort: ports.Reserve(t), ManagerAuthority: []byte(authority)}
		server, listener, err := listenPrivately(options, &Observations{}, logr.Discard())
		if server != nil || listener != nil || (err == nil) != (authority == "") {
			t.Errorf("authority %q: server %v, listener %v, error %v", authority, server, listener, err)
		}
	}
}
