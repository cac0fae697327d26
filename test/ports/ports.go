// SPDX-License-Identifier: Apache-2.0

// Package ports reserves TCP ports of the loopback address for servers that a test starts later, or never.
package ports

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
	"testing"
)

// Reserve returns a port on which nothing listens. Until the test ends, only a server that asks for this port gets it:
// neither other tests, which run at the same time, nor outgoing connections. Without a server, connections are refused.
func Reserve(t testing.TB) int {
	t.Helper()
	port, release, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return port
}

// Address reserves a port as Reserve does, and returns its address.
func Address(t testing.TB) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(Reserve(t)))
}

// Hold reserves a port until release is called. It binds a socket that does not listen. Linux never chooses the port of a
// bound socket for another one (unless ip_autobind_reuse is set). With SO_REUSEADDR on both sockets, which servers set,
// it lets a server bind the same port.
func Hold() (port int, release func(), err error) {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("socket: %w", err)
	}
	release = func() { syscall.Close(socket) } //nolint:errcheck // nothing was written
	address, err := bind(socket)
	if err != nil {
		release()
		return 0, nil, err
	}
	return address.Port, release, nil
}

func bind(socket int) (*syscall.SockaddrInet4, error) {
	if err := syscall.SetsockoptInt(socket, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return nil, fmt.Errorf("SO_REUSEADDR: %w", err)
	}
	if err := syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return nil, fmt.Errorf("bind a port of 127.0.0.1: %w", err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		return nil, fmt.Errorf("getsockname: %w", err)
	}
	return name.(*syscall.SockaddrInet4), nil
}
