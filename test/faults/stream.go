// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bufio"
	"errors"
	"io"
	"sync"
	"time"
)

// event is a line of a watch, with its time of arrival and the number of writes before it.
type event struct {
	line   []byte
	writes int
	at     time.Time
}

// stream is the body of a watch. It returns events in order, each after the lag of the schedule.
type stream struct {
	injector *Injector
	path     string // path and label selector of the watch
	body     io.ReadCloser
	events   chan event
	ended    chan struct{}
	endOnce  sync.Once
	cause    error
	rest     []byte // unread part of the current event
}

func newStream(i *Injector, path string, body io.ReadCloser) *stream {
	s := &stream{injector: i, path: path, body: body, events: make(chan event, 1024), ended: make(chan struct{})}
	go s.receive()
	return s
}

// receive reads events until the API server or the manager ends the watch.
func (s *stream) receive() {
	lines := bufio.NewReader(s.body)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			select {
			case s.events <- event{line, s.injector.Writes(), time.Now()}:
			case <-s.ended:
				return
			}
		}
		if err != nil {
			close(s.events) // Read still returns the buffered events
			if !errors.Is(err, io.EOF) {
				s.end(err)
			}
			return
		}
	}
}

// end breaks the stream. Later reads return the cause.
func (s *stream) end(cause error) {
	s.endOnce.Do(func() {
		s.cause = cause
		close(s.ended)
		s.body.Close()
	})
}

// Read returns the next part of the current event, or waits until the next event is due.
func (s *stream) Read(into []byte) (int, error) {
	if len(s.rest) == 0 {
		select {
		case <-s.ended:
			return 0, s.cause
		case next, open := <-s.events:
			if !open {
				return 0, io.EOF
			}
			if err := s.wait(next); err != nil {
				return 0, err
			}
			s.rest = next.line
		}
	}
	n := copy(into, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// wait delays an event until the manager has done Schedule.Lag writes after its arrival, or until the lag time has
// passed.
func (s *stream) wait(e event) error {
	schedule := s.injector.schedule
	if schedule.Lag == 0 {
		return nil
	}
	late := time.NewTimer(time.Until(e.at.Add(schedule.lagTime())))
	defer late.Stop()
	for {
		s.injector.mu.Lock()
		writes, written := s.injector.writes, s.injector.written
		s.injector.mu.Unlock()
		if writes >= e.writes+schedule.Lag {
			return nil
		}
		select {
		case <-written:
		case <-late.C:
			return nil
		case <-s.ended:
			return s.cause
		}
	}
}

// Close ends the watch on behalf of the manager.
func (s *stream) Close() error {
	s.end(io.ErrClosedPipe)
	s.injector.mu.Lock()
	defer s.injector.mu.Unlock()
	delete(s.injector.streams, s)
	return nil
}
