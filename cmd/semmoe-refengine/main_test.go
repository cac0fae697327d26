// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/http"
	"testing"

	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/test/ports"
)

func TestMain(m *testing.M) { clitest.Main(m, main) }

func TestHelpOfFlags(t *testing.T) { clitest.CheckHelp(t, newRootCommand()) }

// TestEngineEnds stops an engine without requests, and an engine that waits for its other nodes, while clients hold
// silent connections.
func TestEngineEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		status int
	}{
		"idle":              {nil, http.StatusOK},
		"waiting for nodes": {[]string{"--tp-size=2", "--ep-size=2", "--nnodes=2"}, http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			address := ports.Address(t)
			_, port, err := net.SplitHostPort(address)
			if err != nil {
				t.Fatal(err)
			}
			addresses := []string{address}
			args := append([]string{"--model-path=" + clitest.TinyModel, "--host=127.0.0.1", "--port=" + port}, tc.args...)
			if tc.args != nil {
				meeting := ports.Address(t)
				args, addresses = append(args, "--dist-init-addr="+meeting), append(addresses, meeting)
			}
			engine := clitest.Start(t, nil, args...)
			for _, address := range addresses {
				engine.WaitFor(t, func() bool {
					connection, err := net.Dial("tcp", address)
					if err == nil {
						t.Cleanup(func() { connection.Close() })
					}
					return err == nil
				})
			}
			engine.WaitFor(t, func() bool {
				response, err := http.Get("http://" + address + "/health")
				if err != nil {
					return false
				}
				response.Body.Close()
				return response.StatusCode == tc.status
			})
			if err := engine.Terminate(t); err != nil {
				t.Error(err)
			}
		})
	}
}
