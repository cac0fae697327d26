// SPDX-License-Identifier: Apache-2.0

// Package kveventstest publishes KV events like the engines, for tests. It checks what a client sends as strictly as
// libzmq.
package kveventstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Pod is a pod whose ranks publish KV events on 127.0.0.1.
type Pod struct {
	// Port is the port of rank 0. Replays have the ports after those of the ranks.
	Port  int
	Ranks []*Rank
}

// Rank is a publisher.
type Rank struct {
	t              testing.TB
	events, replay net.Listener

	mu          sync.Mutex
	changed     *sync.Cond
	subscribers []net.Conn
	connections []net.Conn
	// subscriptions is the number of subscriptions since the start, also of closed connections.
	subscriptions int
	// sequence is the number of the next message, buffer the messages that a replay contains.
	sequence uint64
	buffer   []message
	replays  int
	closed   bool
}

type message struct {
	sequence uint64
	payload  []byte
}

// Start starts a pod, without replays if replayed is false. It ends with the test.
func Start(t testing.TB, ranks int, replayed bool) *Pod {
	t.Helper()
	for range 100 {
		if pod := start(t, ranks, replayed); pod != nil {
			t.Cleanup(func() {
				for _, r := range pod.Ranks {
					r.close()
				}
			})
			return pod
		}
	}
	t.Fatal("no range of free ports was found")
	return nil
}

// start returns nil if a port is not free.
func start(t testing.TB, ranks int, replayed bool) *Pod {
	var listeners []net.Listener
	fail := func() *Pod {
		for _, l := range listeners {
			l.Close() //nolint:errcheck // nothing was accepted
		}
		return nil
	}
	port := 0 // free, then the following ones
	for range 2 * ranks {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			return fail()
		}
		listeners = append(listeners, l)
		if port = l.Addr().(*net.TCPAddr).Port + 1; port > 65535 {
			return fail()
		}
	}
	pod := &Pod{Port: listeners[0].Addr().(*net.TCPAddr).Port}
	for i := range ranks {
		r := &Rank{t: t, events: listeners[i], replay: listeners[ranks+i]}
		r.changed = sync.NewCond(&r.mu)
		pod.Ranks = append(pod.Ranks, r)
		go r.accept(r.events, r.serveEvents)
		if replayed {
			go r.accept(r.replay, r.serveReplay)
		} else {
			r.replay.Close() //nolint:errcheck // nothing was accepted
		}
	}
	return pod
}

func (r *Rank) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.events.Close() //nolint:errcheck // the test has ended
	r.replay.Close() //nolint:errcheck // the test has ended
	r.Disconnect()
}

// Disconnect closes all connections.
func (r *Rank) Disconnect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.connections {
		c.Close() //nolint:errcheck // the client sees the end
	}
	r.connections, r.subscribers = nil, nil
}

// Restart closes all connections, and counts from 0 again, without earlier messages.
func (r *Rank) Restart() {
	r.mu.Lock()
	r.sequence, r.buffer = 0, nil
	r.mu.Unlock()
	r.Disconnect()
}

// Publish publishes a batch.
func (r *Rank) Publish(batch []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.send([]byte("kv"), binary.BigEndian.AppendUint64(nil, r.sequence), batch)
	r.keep(batch)
}

// Lose counts a batch without sending it, as a publisher whose queue is full. A replay contains it if kept is true.
func (r *Rank) Lose(batch []byte, kept bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if kept {
		r.keep(batch)
		return
	}
	r.sequence++
	r.buffer = nil
}

// Send sends a message with any frames, which no replay contains.
func (r *Rank) Send(frames ...[]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.send(frames...)
}

// SendRaw sends bytes that need be no message.
func (r *Rank) SendRaw(data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.subscribers {
		c.Write(data) //nolint:errcheck // a client may have closed the connection
	}
}

// AwaitSubscriptions waits until clients have subscribed n times since the start. What is published earlier reaches no
// client, although its replay may have ended: as with libzmq, a subscription has no answer.
func (r *Rank) AwaitSubscriptions(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.subscriptions < n && !r.closed {
		r.changed.Wait()
	}
}

// Replays returns the number of replays.
func (r *Rank) Replays() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.replays
}

// keep is called with the lock.
func (r *Rank) keep(batch []byte) {
	r.buffer = append(r.buffer, message{r.sequence, bytes.Clone(batch)})
	r.sequence++
}

// send is called with the lock.
func (r *Rank) send(frames ...[]byte) {
	data := Message(frames...)
	for _, c := range r.subscribers {
		c.Write(data) //nolint:errcheck // a client may have closed the connection
	}
}

// Message returns the bytes of a message.
func Message(frames ...[]byte) (data []byte) {
	for i, frame := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = 1
		}
		if len(frame) > 255 {
			data = binary.BigEndian.AppendUint64(append(data, flags|2), uint64(len(frame)))
		} else {
			data = append(data, flags, byte(len(frame)))
		}
		data = append(data, frame...)
	}
	return data
}

func (r *Rank) accept(l net.Listener, serve func(net.Conn) error) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.connections = append(r.connections, c)
		r.mu.Unlock()
		go func() {
			defer c.Close() //nolint:errcheck // the client sees the end
			if err := serve(c); err != nil {
				r.t.Errorf("a client of KV events violates ZMTP: %v", err)
			}
		}()
	}
}

// handshake checks the greeting and the READY command of a client of a type.
func handshake(c net.Conn, own, client string) error {
	greeting := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1}, make([]byte, 52)...)
	copy(greeting[12:], "NULL")
	got := make([]byte, len(greeting))
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	want := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0}, greeting[12:]...)
	if !bytes.Equal(got, want) {
		return fmt.Errorf("greeting % x, want % x", got, want)
	}
	ready := func(socketType string) []byte {
		body := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00"), byte(len(socketType)))
		body = append(body, socketType...)
		return append([]byte{4, byte(len(body))}, body...)
	}
	want = ready(client)
	got = make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("command %q, want %q", got, want)
	}
	identity := append([]byte("\x08Identity"), 0, 0, 0, 0) // libzmq sends it, with an empty value
	answer := append(ready(own), identity...)
	answer[1] += byte(len(identity))
	_, err := c.Write(answer)
	return err
}

func (r *Rank) serveEvents(c net.Conn) error {
	if err := handshake(c, "PUB", "SUB"); err != nil {
		return ignoreEnd(err)
	}
	subscription := make([]byte, 3)
	if _, err := io.ReadFull(c, subscription); err != nil {
		return ignoreEnd(err)
	}
	if !bytes.Equal(subscription, []byte{0, 1, 1}) {
		return fmt.Errorf("subscription % x; want a message of 3.0 for all topics", subscription)
	}
	r.mu.Lock()
	r.subscribers = append(r.subscribers, c)
	r.subscriptions++
	r.changed.Broadcast()
	r.mu.Unlock()
	n, _ := io.Copy(io.Discard, c) // until the client closes the connection
	if n > 0 {
		return fmt.Errorf("a subscriber sends %d further bytes", n)
	}
	return nil
}

func (r *Rank) serveReplay(c net.Conn) error {
	if err := handshake(c, "ROUTER", "DEALER"); err != nil {
		return ignoreEnd(err)
	}
	request := make([]byte, 12)
	if _, err := io.ReadFull(c, request); err != nil {
		return ignoreEnd(err)
	}
	if !bytes.Equal(request[:4], []byte{1, 0, 0, 8}) {
		return fmt.Errorf("request % x; want an empty frame and 8 bytes", request)
	}
	first := binary.BigEndian.Uint64(request[4:])
	r.mu.Lock()
	r.replays++
	var data []byte
	for _, m := range r.buffer {
		if m.sequence >= first {
			data = append(data, Message(nil, []byte("kv"), binary.BigEndian.AppendUint64(nil, m.sequence), m.payload)...)
		}
	}
	r.mu.Unlock()
	data = append(data, Message(nil, nil, bytes.Repeat([]byte{0xff}, 8), nil)...)
	if _, err := c.Write(data); err != nil {
		return nil // the client has closed the connection
	}
	io.Copy(io.Discard, c) //nolint:errcheck // until the client closes the connection
	return nil
}

// ignoreEnd ignores that a client has closed the connection.
func ignoreEnd(err error) error {
	var network net.Error
	if errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
