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
	// retry is how long a member waits before it calls a leader again that is not there yet.
	retry = 200 * time.Millisecond
	// helloTimeout bounds how long a connection may take to say who it is.
	helloTimeout = 10 * time.Second
	// maxHello bounds what a connection may say.
	maxHello = 64
	// beat is the interval of a leader's heartbeat to its members. silence is how long a member that leaves waits for the next beat:
	// a leader that hangs, or that is out of reach, does not keep it.
	beat    = 100 * time.Millisecond
	silence = 1500 * time.Millisecond

	accepted = "joined\n"
	leaving  = "leaving\n"
)

// ErrLeaving is what Lead tells of a member that is told to stop. It stays until the group is dissolved.
var ErrLeaving = errors.New("is told to stop")

// ErrSilent is what wait returns after leave where the leader does not answer.
var ErrSilent = errors.New("the leader is silent")

// Lead waits until all other nodes of a group have joined. Members that are told to stop, and those that are lost or whose connection
// breaks, are told on lost, once each; the group is dissolved by leave.
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
			return nil, nil, errors.Join(ctx.Err(), fmt.Errorf("wait for the other nodes of the group (%d of %d are there): %w", joined, nodes, err))
		}
		stopAdmission := context.AfterFunc(ctx, func() { connection.Close() })
		node, err := admit(connection, members)
		stopAdmission()
		if err != nil {
			_, _ = fmt.Fprintln(connection, err) // whoever it was has gone, or is to know why
			connection.Close()
			continue
		}
		members[node] = connection
		joined++
	}
	told := make(chan error, 3*nodes) // as much as there can be to tell, whether or not somebody reads it
	for node, member := range members[1:] {
		if _, err := io.WriteString(member, accepted); err != nil {
			told <- fmt.Errorf("node %d of the group is lost: %w", node+1, err)
		}
		go beats(member)
		go func() {
			said := bufio.NewReader(io.LimitReader(member, maxHello))
			line, err := said.ReadString('\n')
			if line == leaving {
				told <- fmt.Errorf("node %d of the group %w", node+1, ErrLeaving)
				_, err = said.ReadString('\n')
			}
			if !errors.Is(err, net.ErrClosed) {
				told <- fmt.Errorf("node %d of the group is lost", node+1)
			}
		}()
	}
	return told, leave, nil
}

// beats writes to a member until the connection is closed.
func beats(member net.Conn) {
	for {
		if _, err := io.WriteString(member, "\n"); err != nil {
			return
		}
		time.Sleep(beat)
	}
}

// admit reads who a connection is.
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
		return 0, fmt.Errorf("%q is no greeting", strings.TrimSpace(line))
	}
	switch {
	case nodes != len(members):
		return 0, fmt.Errorf("--nnodes is %d here and %d there", len(members), nodes)
	case node < 1 || node >= nodes:
		return 0, fmt.Errorf("--node-rank is %d; allowed is 1 to %d", node, nodes-1)
	case members[node] != nil:
		return 0, fmt.Errorf("there are two nodes with --node-rank %d", node)
	}
	return node, connection.SetReadDeadline(time.Time{})
}

// Join calls the leader at an address until it answers, and returns once all nodes have joined. Then wait waits until the group ends, and
// leave asks the leader to end it. After that, wait returns ErrSilent where the leader is silent.
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
		return nil, nil, fmt.Errorf("join the group: %w", err)
	}
	said := bufio.NewReader(connection)
	answer, err := readLine(said)
	if err != nil || answer != accepted {
		connection.Close()
		return nil, nil, errors.Join(fmt.Errorf("join the group: the leader answers %q", strings.TrimSpace(answer)), err, ctx.Err())
	}
	wait = func(ctx context.Context) error {
		defer connection.Close()
		stop := context.AfterFunc(ctx, func() { connection.Close() })
		defer stop()
		for {
			if left.Load() {
				_ = connection.SetReadDeadline(time.Now().Add(silence)) // the next read fails where this does
			}
			_, err := said.ReadByte()
			switch {
			case err == nil:
			case errors.Is(err, os.ErrDeadlineExceeded):
				return ErrSilent
			default:
				return ctx.Err()
			}
		}
	}
	leave = func() {
		left.Store(true)
		// A leader that hangs does not read.
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
