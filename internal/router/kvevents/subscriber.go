// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
)

const (
	// maxSubscriptions is the maximum number of subscriptions. The prefixes of further ranks are estimated.
	maxSubscriptions = 1024
	// firstPause is the time until a failed subscription is tried again. It doubles each time, up to longestPause.
	firstPause   = 250 * time.Millisecond
	longestPause = 30 * time.Second
	// replayTimeout is the maximum time between two messages of a replay. An engine that is busy answers after its step.
	replayTimeout = 10 * time.Second
	// logPause is the minimum time between two logs of a subscription about the same reason.
	logPause = time.Minute
)

// endOfReplay is the sequence number of the message after the last one of a replay.
const endOfReplay = 1<<64 - 1

// Target is a rank to subscribe to.
type Target struct {
	Place
	// Host is the host of the pod. Ranks is the number of ranks of the pod; at least 1.
	Host  string
	Ranks int
	// Vocabulary is the number of token IDs of the model; 0 if it is not known.
	Vocabulary int
}

// Subscriptions subscribes to the KV events of ranks. It is safe for concurrent use.
type Subscriptions struct {
	port    int
	log     logr.Logger
	metrics *metrics
	// total is the number of indexed blocks of all ranks.
	total atomic.Int64

	mu sync.RWMutex
	// running contains the subscriptions by target. ended is true once Run has returned.
	running map[Target]*subscription
	byPlace map[Place]*rank
	ended   bool
	group   sync.WaitGroup
}

// New returns subscriptions to the ranks that publish from a port on: rank r of a pod with n ranks at port+r, with
// replays at port+n+r.
func New(port int, log logr.Logger) *Subscriptions {
	return &Subscriptions{port: port, log: log.WithName("kv-events"), metrics: newMetrics(), running: map[Target]*subscription{}, byPlace: map[Place]*rank{}}
}

// Run ends all subscriptions at the end of the context, and waits for them.
func (s *Subscriptions) Run(ctx context.Context) {
	<-ctx.Done()
	s.mu.Lock()
	s.ended = true
	for _, one := range s.running {
		one.cancel()
	}
	s.mu.Unlock()
	s.group.Wait()
}

// Set replaces the targets. Subscriptions to targets that stay go on.
func (s *Subscriptions) Set(targets []Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	if len(targets) > maxSubscriptions {
		s.log.Info("Ignoring the KV events of some ranks: there are too many", "ranks", len(targets), "maximum", maxSubscriptions)
		targets = targets[:maxSubscriptions]
	}
	was := s.running
	s.running, s.byPlace = make(map[Target]*subscription, len(targets)), make(map[Place]*rank, len(targets))
	for _, target := range targets {
		one := was[target]
		if one == nil {
			if s.running[target] != nil {
				continue
			}
			one = s.start(target)
		}
		delete(was, target)
		s.running[target], s.byPlace[target.Place] = one, one.rank
	}
	for _, gone := range was {
		gone.cancel()
	}
}

func (s *Subscriptions) start(target Target) *subscription {
	ctx, cancel := context.WithCancel(context.Background())
	one := &subscription{
		Subscriptions: s, cancel: cancel, rank: newRank(target.Rank, target.Vocabulary, &s.total),
		address: net.JoinHostPort(target.Host, strconv.Itoa(s.port+target.Rank)),
		replays: net.JoinHostPort(target.Host, strconv.Itoa(s.port+max(1, target.Ranks)+target.Rank)),
		logged:  map[string]time.Time{},
	}
	s.group.Go(func() { one.run(ctx) })
	return one
}

// ranks returns the ranks of the targets.
func (s *Subscriptions) ranks() map[Place]*rank {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.byPlace // replaced, never changed
}

// subscription receives the events of one rank. It belongs to one goroutine.
type subscription struct {
	*Subscriptions
	cancel           context.CancelFunc
	rank             *rank
	address, replays string
	logged           map[string]time.Time
	// next is the sequence number of the next message.
	next uint64
}

// run subscribes until the context ends.
func (s *subscription) run(ctx context.Context) {
	defer s.rank.setLive(false)
	for pause := firstPause; ctx.Err() == nil; pause = min(2*pause, longestPause) {
		live, err := s.session(ctx)
		s.rank.setLive(false)
		if ctx.Err() != nil {
			return
		}
		if live {
			pause = firstPause
			s.drop(reasonDisconnected, err)
		} else {
			s.logAtMostOnce("not connected", "Failed to subscribe to the KV events of a rank, prefixes are estimated", err)
		}
		// Routers that lost the same pod do not reconnect at the same time.
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// session receives events until the connection breaks. live is true if it had been established.
func (s *subscription) session(ctx context.Context) (live bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	socket, err := dial(ctx, s.address, "SUB", "PUB", "XPUB")
	if err != nil {
		return false, err
	}
	defer socket.close()
	if err := socket.subscribe(""); err != nil {
		return false, err
	}
	// An engine that has restarted counts from 0 again. Without a replay, the first message may have any number.
	s.next = 0
	known := s.replay(ctx) == nil
	s.rank.setLive(true)
	s.log.V(1).Info("Subscribed to the KV events of a rank", "address", s.address, "rank", s.rank.number, "replayed", known, "messages", s.next)
	for {
		frames, err := socket.receive()
		if err != nil {
			return true, err
		}
		sequence, payload, err := parseMessage(frames)
		if err != nil {
			s.rank.forget()
			s.drop(reasonMalformed, err)
			continue
		}
		if known && sequence > s.next {
			if err := s.replay(ctx); err != nil || sequence > s.next {
				s.rank.forget()
				s.drop(reasonGap, fmt.Errorf("messages %d to %d are lost", s.next, sequence-1))
			}
		}
		if known && sequence < s.next {
			continue // the replay contained it
		}
		s.apply(payload)
		s.next, known = sequence+1, true
	}
}

// parseMessage returns the sequence number and the batch of a message, which are its last two frames. The topic before
// them is absent in the replays of some releases.
func parseMessage(frames [][]byte) (sequence uint64, payload []byte, err error) {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, malformed(fmt.Sprintf("message of %d frames; want topic, 8 bytes of sequence number, batch", n), nil)
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], nil
}

// replay applies the recent messages from the next one on. It fails if the engine publishes no replays.
func (s *subscription) replay(ctx context.Context) error {
	socket, err := dial(ctx, s.replays, "DEALER", "ROUTER")
	if err != nil {
		return err
	}
	defer socket.close()
	if err := socket.send(nil, binary.BigEndian.AppendUint64(nil, s.next)); err != nil {
		return err
	}
	for first := true; ; first = false {
		if err := socket.connection.SetReadDeadline(time.Now().Add(replayTimeout)); err != nil {
			return err
		}
		frames, err := socket.receive()
		if err != nil {
			return err
		}
		sequence, payload, err := parseMessage(frames)
		switch {
		case err != nil:
			return err
		case sequence == endOfReplay:
			return nil
		case sequence < s.next:
			continue
		case sequence > s.next:
			// The engine keeps a limited number of messages. Before the first subscription, nothing is lost by that.
			s.rank.forget()
			if !first || s.next > 0 {
				s.drop(reasonGap, fmt.Errorf("messages %d to %d are lost", s.next, sequence-1))
			}
		}
		s.apply(payload)
		s.next = sequence + 1
	}
}

// apply applies a batch of events.
func (s *subscription) apply(payload []byte) {
	events, number, err := decodeBatch(payload)
	if err != nil {
		s.rank.forget()
		s.drop(reasonMalformed, err)
		return
	}
	var done changes
	err = s.rank.apply(events, number, &done)
	s.metrics.add(&done)
	if err != nil {
		s.drop(reasonOf(err), err)
	}
}

// reasonOf returns the reason of an error of rank.apply.
func reasonOf(err error) string {
	switch {
	case errors.Is(err, errRank):
		return reasonRank
	case errors.Is(err, errBlockSize):
		return reasonBlockSize
	case errors.Is(err, errGroups):
		return reasonGroups
	}
	return reasonVocabulary
}

// drop counts and logs that events were not used.
func (s *subscription) drop(reason string, err error) {
	s.metrics.drops.WithLabelValues(reason).Inc()
	s.logAtMostOnce(reason, "Ignoring KV events of a rank", err)
}

// logAtMostOnce logs a message unless the subscription has logged the reason within logPause.
func (s *subscription) logAtMostOnce(reason, message string, err error) {
	if now := time.Now(); now.Sub(s.logged[reason]) >= logPause {
		s.logged[reason] = now
		s.log.Info(message, "address", s.address, "rank", s.rank.number, "reason", reason, "error", fmt.Sprint(err))
	}
}
