// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/router/kvevents/kveventstest"
	"github.com/semmoe/operator/test/poll"
)

// subscribed returns subscriptions to all ranks of a pod, once they are live and receive what is published.
func subscribed(t *testing.T, pod *kveventstest.Pod) *Subscriptions {
	t.Helper()
	s := New(pod.Port, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	var targets []Target
	for rank := range pod.Ranks {
		targets = append(targets, Target{Place: Place{"pod:1", rank}, Host: "127.0.0.1", Ranks: len(pod.Ranks), Vocabulary: 1000})
	}
	s.Set(targets)
	for rank := range pod.Ranks {
		pod.Ranks[rank].AwaitSubscriptions(1)
		awaitLive(t, s, rank)
	}
	return s
}

func awaitLive(t *testing.T, s *Subscriptions, rank int) {
	t.Helper()
	poll.Until(t, "the subscription is live", func() bool {
		_, known := s.ranks()[Place{"pod:1", rank}].state()
		return known
	})
}

// awaitCached waits until a rank has cached a number of tokens of a prompt.
func awaitCached(t *testing.T, s *Subscriptions, rank, want int, prompt Prompt) {
	t.Helper()
	got := -1
	poll.Until(t, "the rank has cached the expected tokens", func() bool {
		got = s.Cached(prompt)[Place{"pod:1", rank}]
		return got == want
	})
}

func (s *Subscriptions) dropped(reason string) float64 {
	return testutil.ToFloat64(s.metrics.drops.WithLabelValues(reason))
}

// Batches of blocks of two tokens: first stores 1 to 4, second 5 and 6.
var (
	first  = kveventstest.Batch(0, kveventstest.Stored(-1, []int64{10, 11}, []int32{1, 2, 3, 4}, 2))
	second = kveventstest.Batch(0, kveventstest.Stored(11, []int64{12}, []int32{5, 6}, 2))
	whole  = promptOf(1, 2, 3, 4, 5, 6, 7)
)

func TestSubscribesToEachRank(t *testing.T) {
	pod := kveventstest.Start(t, 2, true)
	pod.Ranks[0].Publish(first) // before the subscription: from the replay
	s := subscribed(t, pod)
	awaitCached(t, s, 0, 4, whole)
	pod.Ranks[0].Publish(second)
	pod.Ranks[1].Publish(kveventstest.Batch(1, kveventstest.Stored(-1, []int64{10}, []int32{1, 2}, 2)))
	awaitCached(t, s, 0, 6, whole)
	awaitCached(t, s, 1, 2, whole)
	pod.Ranks[0].Publish(kveventstest.Batch(0, kveventstest.Removed(11)))
	awaitCached(t, s, 0, 2, whole)
	if problems := testutil.CollectAndCount(s.metrics.drops); problems != len(reasons) {
		t.Errorf("%d reasons are counted, want %d", problems, len(reasons))
	}
}

func TestLargeMessages(t *testing.T) {
	pod := kveventstest.Start(t, 1, true)
	s := subscribed(t, pod)
	tokens := make([]int32, 100_000)
	for i := range tokens {
		tokens[i] = int32(i % 1000)
	}
	pod.Ranks[0].Publish(kveventstest.Batch(0, kveventstest.Stored(-1, numbers[int64](1, len(tokens)/16), tokens, 16)))
	awaitCached(t, s, 0, len(tokens)-16, Prompt{Tokens: func(int) []int32 { return tokens }})
}

// TestLostMessages checks that lost messages are replayed, and that the blocks are forgotten if they cannot be.
func TestLostMessages(t *testing.T) {
	for name, test := range map[string]struct {
		replays, kept bool
		want          int
		gaps          float64
	}{
		"replayed":    {replays: true, kept: true, want: 6},
		"too old":     {replays: true, gaps: 1},
		"not offered": {kept: true, gaps: 1},
	} {
		t.Run(name, func(t *testing.T) {
			pod := kveventstest.Start(t, 1, test.replays)
			s := subscribed(t, pod)
			pod.Ranks[0].Publish(first)
			awaitCached(t, s, 0, 4, whole)
			pod.Ranks[0].Lose(second, test.kept)
			pod.Ranks[0].Publish(kveventstest.Batch(0, kveventstest.Stored(-1, []int64{50}, []int32{50, 51}, 2)))
			awaitCached(t, s, 0, 2, promptOf(50, 51, 52))
			awaitCached(t, s, 0, test.want, whole)
			if got := s.dropped(reasonGap); got != test.gaps {
				t.Errorf("%v gaps are counted, want %v", got, test.gaps)
			}
		})
	}
}

// TestRestartedEngine checks that the blocks of an engine that has restarted are forgotten, and that its events count
// again from 0.
func TestRestartedEngine(t *testing.T) {
	pod := kveventstest.Start(t, 1, true)
	s := subscribed(t, pod)
	pod.Ranks[0].Publish(first)
	pod.Ranks[0].Publish(second)
	awaitCached(t, s, 0, 6, whole)
	pod.Ranks[0].Restart()
	awaitCached(t, s, 0, 0, whole)
	pod.Ranks[0].AwaitSubscriptions(2)
	awaitLive(t, s, 0)
	pod.Ranks[0].Publish(first)
	awaitCached(t, s, 0, 4, whole)
	if got := s.dropped(reasonDisconnected); got != 1 {
		t.Errorf("%v disconnections are counted, want 1", got)
	}
}

// TestMalformedMessages checks that a message that cannot be used is counted by reason, that the blocks of the rank are
// forgotten if events may be lost by it, and that the next events are used.
func TestMalformedMessages(t *testing.T) {
	number := binary.BigEndian.AppendUint64(nil, 1)
	for name, test := range map[string]struct {
		send   func(*kveventstest.Rank)
		reason string
		kept   int
	}{
		"no batch":       {func(r *kveventstest.Rank) { r.Publish([]byte("hello")) }, reasonMalformed, 0},
		"one frame":      {func(r *kveventstest.Rank) { r.Send([]byte("hello")) }, reasonMalformed, 0},
		"a short number": {func(r *kveventstest.Rank) { r.Send([]byte("kv"), number[:4], first) }, reasonMalformed, 0},
		"another model": {func(r *kveventstest.Rank) {
			r.Publish(kveventstest.Batch(0, kveventstest.Stored(-1, []int64{20}, []int32{1, 1000}, 2)))
		}, reasonVocabulary, 4},
		"another rank": {func(r *kveventstest.Rank) { r.Publish(kveventstest.Batch(3, kveventstest.Removed(10))) }, reasonRank, 0},
		"another block size": {func(r *kveventstest.Rank) {
			r.Publish(kveventstest.Batch(0, kveventstest.Stored(-1, []int64{20}, []int32{1, 2, 3, 4}, 4)))
		}, reasonBlockSize, 0},
		"no ZMTP":      {func(r *kveventstest.Rank) { r.SendRaw([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) }, reasonDisconnected, 4},
		"a huge frame": {func(r *kveventstest.Rank) { r.SendRaw([]byte{2, 0, 0, 1, 0, 0, 0, 0, 0}) }, reasonDisconnected, 4},
		"many frames":  {func(r *kveventstest.Rank) { r.Send(make([][]byte, maxFrames+1)...) }, reasonDisconnected, 4},
	} {
		t.Run(name, func(t *testing.T) {
			pod := kveventstest.Start(t, 1, true)
			s := subscribed(t, pod)
			rank := pod.Ranks[0]
			rank.Publish(first)
			awaitCached(t, s, 0, 4, whole)
			test.send(rank)
			poll.Until(t, "the message is counted", func() bool { return s.dropped(test.reason) > 0 })
			// A reconnected subscription is replayed from the start.
			awaitCached(t, s, 0, test.kept, whole)
			if test.reason == reasonDisconnected {
				rank.AwaitSubscriptions(2)
			}
			awaitLive(t, s, 0)
			size, _ := s.ranks()[Place{"pod:1", 0}].state()
			rank.Publish(kveventstest.Batch(0, kveventstest.Stored(-1, []int64{50}, numbers[int32](50, max(2, size)), max(2, size))))
			poll.Until(t, "later events are used", func() bool { return s.Cached(promptOf(50, 51, 52, 53, 54))[Place{"pod:1", 0}] > 0 })
		})
	}
}

// TestTargets checks that subscriptions follow the targets, and end with them.
func TestTargets(t *testing.T) {
	pod := kveventstest.Start(t, 1, true)
	s := subscribed(t, pod)
	pod.Ranks[0].Publish(first)
	awaitCached(t, s, 0, 4, whole)
	target := Target{Place: Place{"pod:1", 0}, Host: "127.0.0.1", Ranks: 1, Vocabulary: 1000}
	s.Set([]Target{target, target})
	awaitCached(t, s, 0, 4, whole) // the subscription goes on
	if got := pod.Ranks[0].Replays(); got != 1 {
		t.Errorf("%d replays, want 1", got)
	}
	s.Set(nil)
	if got := s.Cached(whole); len(got) != 0 {
		t.Errorf("%v is cached without targets", got)
	}
	poll.Until(t, "the blocks are released", func() bool { return s.total.Load() == 0 })
}

// TestHandshake checks that peers other than ZMTP 3 sockets of the right type are refused.
func TestHandshake(t *testing.T) {
	for name, command := range map[string]string{
		"an error":       "\x05ERROR\x06denied",
		"another type":   "\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH",
		"no type":        "\x05READY",
		"a cut property": "\x05READY\x0bSocket-Type\x00\x00\x00\x09PUB",
		"a cut name":     "\x05READY\xffPUB",
	} {
		if err := checkReady([]byte(command), []string{"PUB"}); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	if err := checkReady([]byte("\x05READY\x08Identity\x00\x00\x00\x00\x0bsocket-type\x00\x00\x00\x04XPUB"), []string{"PUB", "XPUB"}); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(kveventstest.Message([]byte("a"), nil), []byte{1, 1, 'a', 0, 0}) {
		t.Error("the test's publisher writes wrong frames")
	}
}
