// SPDX-License-Identifier: Apache-2.0

package ports_test

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/semmoe/operator/test/ports"
)

// TestReserve checks that connections to a reserved port are refused, that no other socket gets the port by chance, and
// that a server that asks for it gets it, also for all addresses.
func TestReserve(t *testing.T) {
	address := ports.Address(t)
	if _, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection to a reserved port: %v", err)
	}
	reserved := map[string]bool{} // about 1% of the ports that Linux chooses from: 1,000 choices by chance would hit one
	for range 300 {
		_, port, err := net.SplitHostPort(ports.Address(t))
		if err != nil {
			t.Fatal(err)
		}
		reserved[port] = true
	}
	for _, anyPort := range []string{"127.0.0.1:0", ":0"} {
		for range 1000 {
			listener, err := net.Listen("tcp", anyPort)
			if err != nil {
				t.Fatal(err)
			}
			_, port, _ := net.SplitHostPort(listener.Addr().String())
			listener.Close()
			if reserved[port] {
				t.Fatalf("a listener on %s got a reserved port", anyPort)
			}
		}
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range []string{address, ":" + port, address} {
		listener, err := net.Listen("tcp", server)
		if err != nil {
			t.Fatalf("a server on the reserved port: %v", err)
		}
		connection, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatalf("a connection to the server: %v", err)
		}
		connection.Close()
		listener.Close()
	}
}
