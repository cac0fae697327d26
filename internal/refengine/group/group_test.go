// SPDX-License-Identifier: Apache-2.0

package group

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

const patience = 20 * time.Second

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

// leading holds the results of Lead.
type leading struct {
	lost  <-chan error
	leave func()
	err   error
}

func lead(ctx context.Context, listener net.Listener, nodes int) <-chan leading {
	done := make(chan leading, 1)
	go func() {
		lost, leave, err := Lead(ctx, listener, nodes)
		done <- leading{lost, leave, err}
	}()
	return done
}

func TestGroup(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	listener := listen(t)
	address := listener.Addr().String()
	leader := lead(ctx, listener, 3)

	for name, hello := range map[string]string{
		"another size":     "node 1 of 4\n",
		"the leader's":     "node 0 of 3\n",
		"beyond the group": "node 3 of 3\n",
		"no greeting":      "GET / HTTP/1.1\n",
	} {
		connection, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(connection, hello); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(connection)
		if err != nil || !strings.Contains(string(answer), "--") && !strings.Contains(string(answer), "greeting") {
			t.Errorf("%s: answer %q, error %v", name, answer, err)
		}
	}

	type member struct {
		wait  func(context.Context) error
		leave func()
		err   error
	}
	join := func(node int) <-chan member {
		done := make(chan member, 1)
		go func() {
			wait, leave, err := Join(ctx, address, node, 3)
			done <- member{wait, leave, err}
		}()
		return done
	}
	first := join(1)
	select {
	case m := <-first:
		t.Fatalf("node 1 has joined a group that is not whole: %+v", m)
	case l := <-leader:
		t.Fatalf("the group is reported as complete: %+v", l)
	case <-time.After(50 * time.Millisecond):
	}
	second := join(2)
	one, two, whole := <-first, <-second, <-leader
	if one.err != nil || two.err != nil || whole.err != nil {
		t.Fatalf("errors %v, %v, %v", one.err, two.err, whole.err)
	}
	two.leave()
	if err := <-whole.lost; !errors.Is(err, ErrLeaving) || !strings.Contains(err.Error(), "node 2") {
		t.Errorf("lost: %v, want that node 2 was asked to stop", err)
	}
	gone, leaveNow := context.WithCancel(ctx)
	leaveNow()
	if err := two.wait(gone); err == nil {
		t.Error("a member that is stopped says that the group has ended")
	}
	if err := <-whole.lost; err == nil || errors.Is(err, ErrLeaving) || !strings.Contains(err.Error(), "node 2") {
		t.Errorf("lost: %v, want node 2", err)
	}
	whole.leave()
	if err := one.wait(ctx); err != nil {
		t.Errorf("the end of the group is reported as %v", err)
	}
}

func TestGroupEndsBeforeItIsComplete(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	leader := lead(ctx, listen(t), 2)
	cancel()
	if l := <-leader; l.err == nil || !strings.Contains(l.err.Error(), "1 of 2 joined") {
		t.Errorf("error %v", l.err)
	}
	if _, _, err := Join(ctx, "127.0.0.1:1", 1, 2); err == nil || !strings.Contains(err.Error(), "--dist-init-addr 127.0.0.1:1") {
		t.Errorf("error %v", err)
	}
}

// A stopped leader closes the connection of a client that sends no greeting.
func TestStopDuringAdmission(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	listener := listen(t)
	connection, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	reporting := &reportingListener{Listener: listener, accepted: make(chan struct{}, 1)}
	leader := lead(ctx, reporting, 2)
	<-reporting.accepted
	cancel()
	if answer, _ := io.ReadAll(connection); len(answer) > 0 {
		t.Errorf("the leader waited for the connection, and answers %q", answer)
	}
	if end := <-leader; end.err == nil {
		t.Error("the leader has a group")
	}
}

// reportingListener reports each accepted connection.
type reportingListener struct {
	net.Listener
	accepted chan struct{}
}

func (l *reportingListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	if err == nil {
		l.accepted <- struct{}{}
	}
	return connection, err
}

// TestLeavesASilentLeader leaves the group of a leader that hangs. A leader that only takes long keeps its member.
func TestLeavesASilentLeader(t *testing.T) {
	listener := listen(t)
	defer listener.Close()
	hanging := make(chan net.Conn, 1)
	go func() {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		io.WriteString(connection, accepted) //nolint:errcheck // the member reports it
		hanging <- connection
	}()
	wait, leave, err := Join(t.Context(), listener.Addr().String(), 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { (<-hanging).Close() }()
	ended := make(chan error, 1)
	go func() { ended <- wait(t.Context()) }()
	leave()
	select {
	case err := <-ended:
		if !errors.Is(err, errSilent) {
			t.Errorf("a leader that hangs: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the member waits for a leader that hangs")
	}

	listener = listen(t)
	leader := lead(t.Context(), listener, 2)
	wait, leave, err = Join(t.Context(), listener.Addr().String(), 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	whole := <-leader
	go func() { ended <- wait(t.Context()) }()
	leave()
	select {
	case err := <-ended:
		t.Fatalf("the member does not wait for a leader that takes long: %v", err)
	case <-time.After(silence + silence/4):
	}
	whole.leave()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
