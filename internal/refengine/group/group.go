// SPDX-License-Identifier: Apache-2.0

package group

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// retry is the interval at which a member tries to connect to its leader.
	retry = 200 * time.Millisecond
	// helloTimeout limits the time to receive the greeting of a connection.
	helloTimeout = 10 * time.Second
	// maxHello limits the length of a greeting, in bytes.
	maxHello = 64
	// beat is the interval of the leader's heartbeats. silence is the time that a leaving member waits for the next
	// heartbeat, so that it does not wait for a leader that hangs or is unreachable.
	beat    = 100 * time.Millisecond
	silence = 1500 * time.Millisecond

	accepted = "joined\n"
	leaving  = "leaving\n"
)

// ErrLeaving reports a member that was asked to stop. The member stays until the group is dissolved.
var ErrLeaving = errors.New("was asked to stop")

// errSilent is the error of wait after leave if the leader does not respond.
var errSilent = errors.New("the leader does not respond")

// Lead waits until all other nodes of a group have joined. It sends one error on lost for each member that was asked to
// stop, or whose connection fails. leave dissolves the group.
func Lead(ctx context.Context, listener net.Listener, nodes int) (lost <-chan error, leave func(), err error) {
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	defer listener.Close()
	members := make([]net.Conn, nodes)
	leave = func() {
		for _, member := range members {
			if member != nil {
				member.Close()
			}
		}
	}
	for joined := 1; joined < nodes; {
		connection, err := listener.Accept()
		if err != nil {
			leave()
			return nil, nil, errors.Join(ctx.Err(), fmt.Errorf("failed to wait for the other nodes of the group (%d of %d joined): %w", joined, nodes, err))
		}
		stopAdmission := context.AfterFunc(ctx, func() { connection.Close() })
		node, err := admit(connection, members)
		stopAdmission()
		if err != nil {
			_, _ = fmt.Fprintln(connection, err) // the error can be ignored if the client has disconnected
			connection.Close()
			continue
		}
		members[node] = connection
		joined++
	}
	events := make(chan error, 3*nodes) // the maximum number of events, so that sending never blocks
	for node, member := range members[1:] {
		if _, err := io.WriteString(member, accepted); err != nil {
			events <- fmt.Errorf("node %d of the group is lost: %w", node+1, err)
		}
		go beats(member)
		go func() {
			input := bufio.NewReader(io.LimitReader(member, maxHello))
			line, err := input.ReadString('\n')
			if line == leaving {
				events <- fmt.Errorf("node %d of the group %w", node+1, ErrLeaving)
				_, err = input.ReadString('\n')
			}
			if !errors.Is(err, net.ErrClosed) {
				events <- fmt.Errorf("node %d of the group is lost", node+1)
			}
		}()
	}
	return events, leave, nil
}

// beats sends heartbeats to a member until the connection is closed.
func beats(member net.Conn) {
	for {
		if _, err := io.WriteString(member, "\n"); err != nil {
			return
		}
		time.Sleep(beat)
	}
}

// admit reads and validates the greeting of a connection.
func admit(connection net.Conn, members []net.Conn) (node int, err error) {
	if err := connection.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return 0, err
	}
	line, err := bufio.NewReader(io.LimitReader(connection, maxHello)).ReadString('\n')
	if err != nil {
		return 0, err
	}
	var nodes int
	if _, err := fmt.Sscanf(line, "node %d of %d\n", &node, &nodes); err != nil {
		return 0, fmt.Errorf("greeting %q is invalid", strings.TrimSpace(line))
	}
	switch {
	case nodes != len(members):
		return 0, fmt.Errorf("--nnodes differs: %d at the leader, %d at the member", len(members), nodes)
	case node < 1 || node >= nodes:
		return 0, fmt.Errorf("--node-rank: %d is invalid: allowed is 1 to %d", node, nodes-1)
	case members[node] != nil:
		return 0, fmt.Errorf("two nodes have --node-rank %d", node)
	}
	return node, connection.SetReadDeadline(time.Time{})
}

// Join connects to the leader at an address, with retries, and returns after all nodes have joined. wait waits until
// the group ends. leave asks the leader to end the group. After leave, wait returns errSilent if the leader does not
// respond.
func Join(ctx context.Context, address string, node, nodes int) (wait func(context.Context) error, leave func(), err error) {
	var dialer net.Dialer
	for {
		connection, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			return join(ctx, connection, node, nodes)
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("--dist-init-addr %s: %w", address, err)
		case <-time.After(retry):
		}
	}
}

func join(ctx context.Context, connection net.Conn, node, nodes int) (wait func(context.Context) error, leave func(), err error) {
	var left atomic.Bool
	stop := context.AfterFunc(ctx, func() { connection.Close() })
	defer stop()
	if _, err := fmt.Fprintf(connection, "node %d of %d\n", node, nodes); err != nil {
		connection.Close()
		return nil, nil, fmt.Errorf("failed to join the group: %w", err)
	}
	input := bufio.NewReader(connection)
	answer, err := readLine(input)
	if err != nil || answer != accepted {
		connection.Close()
		return nil, nil, errors.Join(fmt.Errorf("failed to join the group: the leader responded with %q", strings.TrimSpace(answer)), err, ctx.Err())
	}
	wait = func(ctx context.Context) error {
		defer connection.Close()
		stop := context.AfterFunc(ctx, func() { connection.Close() })
		defer stop()
		for {
			if left.Load() {
				_ = connection.SetReadDeadline(time.Now().Add(silence)) // if this fails, the next read fails, too
			}
			_, err := input.ReadByte()
			switch {
			case err == nil:
			case errors.Is(err, os.ErrDeadlineExceeded):
				return errSilent
			default:
				return ctx.Err()
			}
		}
	}
	leave = func() {
		left.Store(true)
		// A leader that hangs does not read, so the write needs a deadline.
		_ = connection.SetDeadline(time.Now().Add(silence))
		_, _ = io.WriteString(connection, leaving) // a group that has ended needs no message
	}
	return wait, leave, nil
}

// readLine reads a line of at most maxHello bytes.
func readLine(r *bufio.Reader) (string, error) {
	var line []byte
	for len(line) < maxHello {
		b, err := r.ReadByte()
		if err != nil {
			return string(line), err
		}
		if line = append(line, b); b == '\n' {
			return string(line), nil
		}
	}
	return string(line), errors.New("the line is too long")
}
