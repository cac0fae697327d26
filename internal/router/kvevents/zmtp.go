// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	// maxMessageBytes is the maximum size of a message. The blocks of a prompt of a million tokens need 7 MiB.
	maxMessageBytes = 16 << 20
	// maxFrames is the maximum number of frames of a message; engines send four at most.
	maxFrames = 8
	// maxCommandBytes is the maximum size of a command of the handshake.
	maxCommandBytes = 4 << 10
	// handshakeTimeout is the maximum time to connect, and for the handshake.
	handshakeTimeout = 5 * time.Second
	// keptBytes is the maximum size of a buffer that is kept between messages.
	keptBytes = 64 << 10
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Sizes and positions in a greeting: signature, version, mechanism, as-server, filler.
const (
	greetingBytes  = 64
	majorVersion   = 10
	mechanismBegin = 12
	mechanismEnd   = 32
)

// errProtocol is returned for a peer that violates ZMTP 3, or sends more than the bounds allow.
var errProtocol = errors.New("the peer violates ZMTP 3.0")

// socket is a connection of a ZeroMQ socket to one peer. It belongs to one goroutine.
type socket struct {
	connection net.Conn
	reader     *bufio.Reader
	// data contains the frames of the latest message, frames their ends.
	data bytes.Buffer
	ends []int
	stop func() bool
}

// dial connects a socket of a type (SUB or DEALER) to a peer of one of the given types. The connection is closed at the
// end of the context. The client announces version 3.0: peers of 3.1 then send no heartbeats and accept subscriptions as
// messages. A peer that is gone without closing the connection is found by TCP keep-alive, within 30 seconds.
func dial(ctx context.Context, address, socketType string, peers ...string) (*socket, error) {
	dialer := net.Dialer{Timeout: handshakeTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}}
	connection, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	s := &socket{connection: connection, reader: bufio.NewReader(connection)}
	s.stop = context.AfterFunc(ctx, func() { connection.Close() }) //nolint:errcheck // the reader reports the end
	err = connection.SetDeadline(time.Now().Add(handshakeTimeout))
	if err == nil {
		err = s.handshake(socketType, peers)
	}
	if err == nil {
		err = connection.SetDeadline(time.Time{})
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("handshake with %s: %w", address, err)
	}
	return s, nil
}

func (s *socket) close() {
	s.stop()
	s.connection.Close() //nolint:errcheck // nothing is left to send
}

// handshake exchanges the greetings and the READY commands.
func (s *socket) handshake(socketType string, peers []string) error {
	greeting := make([]byte, greetingBytes)
	greeting[0], greeting[9], greeting[majorVersion] = 0xff, 0x7f, 3
	copy(greeting[mechanismBegin:], "NULL")
	if _, err := s.connection.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(s.reader, greeting); err != nil {
		return err
	}
	mechanism := string(bytes.TrimRight(greeting[mechanismBegin:mechanismEnd], "\x00"))
	switch {
	case greeting[0] != 0xff || greeting[9]&1 != 1 || greeting[majorVersion] < 3:
		return fmt.Errorf("%w: greeting % x", errProtocol, greeting[:mechanismBegin])
	case mechanism != "NULL":
		return fmt.Errorf("%w: security mechanism %.20q; want NULL", errProtocol, mechanism)
	}
	ready := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(socketType)))
	ready = append(ready, socketType...)
	if err := s.write(flagCommand, ready); err != nil {
		return err
	}
	flags, size, err := s.frameHeader()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 || size > maxCommandBytes {
		return fmt.Errorf("%w: want a READY command", errProtocol)
	}
	command := make([]byte, size)
	if _, err := io.ReadFull(s.reader, command); err != nil {
		return err
	}
	return checkReady(command, peers)
}

// checkReady returns an error unless a command is the READY command of a peer of one of the given types.
func checkReady(command []byte, peers []string) error {
	properties, ready := bytes.CutPrefix(command, []byte("\x05READY"))
	if !ready {
		return fmt.Errorf("%w: command %.40q; want READY", errProtocol, command)
	}
	for len(properties) > 0 {
		name := int(properties[0])
		if len(properties) < 1+name+4 {
			break
		}
		value := properties[1+name+4:]
		size := binary.BigEndian.Uint32(properties[1+name:])
		if uint64(size) > uint64(len(value)) {
			break
		}
		if bytes.EqualFold(properties[1:1+name], []byte("Socket-Type")) {
			for _, peer := range peers {
				if string(value[:size]) == peer {
					return nil
				}
			}
			return fmt.Errorf("%w: socket type %.20q; want %v", errProtocol, value[:size], peers)
		}
		properties = value[size:]
	}
	return fmt.Errorf("%w: READY has no socket type", errProtocol)
}

// subscribe subscribes a SUB socket to all topics that begin with the prefix.
func (s *socket) subscribe(prefix string) error { return s.write(0, append([]byte{1}, prefix...)) }

// send sends a message.
func (s *socket) send(frames ...[]byte) error {
	for i, frame := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		if err := s.write(flags, frame); err != nil {
			return err
		}
	}
	return nil
}

// write writes a frame of up to 255 bytes. It waits at most handshakeTimeout.
func (s *socket) write(flags byte, frame []byte) error {
	if err := s.connection.SetWriteDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	_, err := s.connection.Write(append([]byte{flags, byte(len(frame))}, frame...))
	return err
}

func (s *socket) frameHeader() (flags byte, size uint64, err error) {
	if flags, err = s.reader.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return 0, 0, fmt.Errorf("%w: frame with flags %#x", errProtocol, flags)
	}
	if flags&flagLong == 0 {
		short, err := s.reader.ReadByte()
		return flags, uint64(short), err
	}
	var long [8]byte
	_, err = io.ReadFull(s.reader, long[:])
	return flags, binary.BigEndian.Uint64(long[:]), err
}

// receive returns the frames of the next message, which are valid until the next call. It waits until a message arrives
// or the context of the socket ends. Commands are ignored.
func (s *socket) receive() ([][]byte, error) {
	if s.data.Cap() > keptBytes {
		s.data = bytes.Buffer{}
	}
	s.data.Reset()
	s.ends = s.ends[:0]
	for more := true; more; {
		flags, size, err := s.frameHeader()
		switch {
		case err != nil:
			return nil, err
		case flags&flagCommand != 0:
			if size > maxCommandBytes {
				return nil, fmt.Errorf("%w: command of %d bytes", errProtocol, size)
			}
			if _, err := s.reader.Discard(int(size)); err != nil {
				return nil, err
			}
			continue
		case size > uint64(maxMessageBytes-s.data.Len()) || len(s.ends) == maxFrames:
			return nil, fmt.Errorf("%w: message of more than %d bytes or %d frames", errProtocol, maxMessageBytes, maxFrames)
		}
		// The buffer grows with the bytes that arrive, not with the size that the peer declares.
		if _, err := io.CopyN(&s.data, s.reader, int64(size)); err != nil {
			return nil, err
		}
		s.ends = append(s.ends, s.data.Len())
		more = flags&flagMore != 0
	}
	frames, begin := make([][]byte, len(s.ends)), 0
	for i, end := range s.ends {
		frames[i], begin = s.data.Bytes()[begin:end], end
	}
	return frames, nil
}
