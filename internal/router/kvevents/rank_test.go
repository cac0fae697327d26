// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/semmoe/operator/internal/router/kvevents/kveventstest"
)

func newTestRank(vocabulary int) *rank { return newRank(0, vocabulary, new(atomic.Int64)) }

// promptOf returns a prompt with these tokens.
func promptOf(ids ...int32) Prompt {
	return Prompt{Tokens: func(int) []int32 { return ids }}
}

// numbers returns n consecutive numbers.
func numbers[T int32 | int64](first T, n int) (all []T) {
	for i := range n {
		all = append(all, first+T(i))
	}
	return all
}

// subscriptionsOf returns subscriptions with these ranks, which have no connection.
func subscriptionsOf(ranks ...*rank) *Subscriptions {
	s := &Subscriptions{byPlace: map[Place]*rank{}}
	for i, r := range ranks {
		s.byPlace[Place{"pod:1", i}] = r
	}
	return s
}

func TestCachedTokens(t *testing.T) {
	const bos = 99
	root := kveventstest.Stored(-1, []int64{10, 11}, []int32{1, 2, 3, 4}, 2)
	for name, test := range map[string]struct {
		batches [][]byte
		prompt  Prompt
		want    int
		err     error
	}{
		"nothing":             {prompt: promptOf(1, 2, 3)},
		"all but the last":    {batches: [][]byte{kveventstest.Batch(0, root)}, prompt: promptOf(1, 2, 3, 4, 5), want: 4},
		"the last is not":     {batches: [][]byte{kveventstest.Batch(0, root)}, prompt: promptOf(1, 2, 3, 4), want: 2},
		"a part":              {batches: [][]byte{kveventstest.Batch(0, root)}, prompt: promptOf(1, 2, 3, 9, 5), want: 2},
		"another beginning":   {batches: [][]byte{kveventstest.Batch(0, root)}, prompt: promptOf(3, 4, 5), want: 0},
		"continued":           {batches: [][]byte{kveventstest.Batch(-1, root), kveventstest.Batch(0, kveventstest.StoredArray(11, []int64{12}, []int32{5, 6}, 2, "GPU"))}, prompt: promptOf(1, 2, 3, 4, 5, 6, 7), want: 6},
		"removed":             {batches: [][]byte{kveventstest.Batch(0, root, kveventstest.Removed(11))}, prompt: promptOf(1, 2, 3, 4, 5), want: 2},
		"removed begin":       {batches: [][]byte{kveventstest.Batch(0, root, kveventstest.Removed(10))}, prompt: promptOf(1, 2, 3, 4, 5), want: 0},
		"removed elsewhere":   {batches: [][]byte{kveventstest.Batch(0, root, kveventstest.RemovedArray("CPU", 10))}, prompt: promptOf(1, 2, 3, 4, 5), want: 4},
		"stored elsewhere":    {batches: [][]byte{kveventstest.Batch(0, kveventstest.StoredArray(-1, []int64{10}, []int32{1, 2}, 2, "CPU"))}, prompt: promptOf(1, 2, 3)},
		"one of two copies":   {batches: [][]byte{kveventstest.Batch(0, root, root, kveventstest.Removed(11))}, prompt: promptOf(1, 2, 3, 4, 5), want: 4},
		"both copies":         {batches: [][]byte{kveventstest.Batch(0, root, root, kveventstest.Removed(11, 11))}, prompt: promptOf(1, 2, 3, 4, 5), want: 2},
		"cleared":             {batches: [][]byte{kveventstest.Batch(0, root, kveventstest.Cleared())}, prompt: promptOf(1, 2, 3, 4, 5), want: 0},
		"unknown parent":      {batches: [][]byte{kveventstest.Batch(0, kveventstest.Stored(5, []int64{10}, []int32{1, 2}, 2))}, prompt: promptOf(1, 2, 3), want: 0},
		"of a LoRA adapter":   {batches: [][]byte{kveventstest.Batch(0, kveventstest.StoredArray(-1, []int64{10}, []int32{1, 2}, 2, "GPU", "lora"))}, prompt: promptOf(1, 2, 3), want: 0},
		"an image":            {batches: [][]byte{kveventstest.Batch(0, kveventstest.StoredArray(-1, []int64{10, 11}, []int32{1, 2, 3, 4}, 2, "GPU", nil, []any{nil, []any{"image"}}))}, prompt: promptOf(1, 2, 3, 4, 5), want: 2},
		"after an image":      {batches: [][]byte{kveventstest.Batch(0, kveventstest.StoredArray(-1, []int64{10}, []int32{1, 2}, 2, "GPU", nil, []any{[]any{"image"}}), kveventstest.Stored(10, []int64{11}, []int32{3, 4}, 2))}, prompt: promptOf(1, 2, 3, 4, 5), want: 0},
		"of another rank":     {batches: [][]byte{kveventstest.Batch(0, root), kveventstest.Batch(1, root)}, prompt: promptOf(1, 2, 3, 4, 5), want: 0, err: errRank},
		"another block size":  {batches: [][]byte{kveventstest.Batch(0, root), kveventstest.Batch(0, kveventstest.Stored(-1, []int64{10}, []int32{1, 2, 3}, 3))}, prompt: promptOf(1, 2, 3, 4, 5), want: 0, err: errBlockSize},
		"outside":             {batches: [][]byte{kveventstest.Batch(0, root), kveventstest.Batch(0, kveventstest.Stored(11, []int64{12}, []int32{5, 100}, 2))}, prompt: promptOf(1, 2, 3, 4, 5, 100, 7), want: 4, err: errVocabulary},
		"a beginning of text": {batches: [][]byte{kveventstest.Batch(0, kveventstest.Stored(-1, []int64{10, 11}, []int32{bos, 1, 2, 3}, 2))}, prompt: Prompt{Tokens: promptOf(1, 2, 3, 4).Tokens, MayPrecede: func(token int32) bool { return token == bos }}, want: 4},
		"not added":           {batches: [][]byte{kveventstest.Batch(0, kveventstest.Stored(-1, []int64{10, 11}, []int32{bos, 1, 2, 3}, 2))}, prompt: Prompt{Tokens: promptOf(1, 2, 3, 4).Tokens, MayPrecede: func(int32) bool { return false }}, want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTestRank(100)
			r.setLive(true)
			var err error
			for _, batch := range test.batches {
				events, number, decodeErr := decodeBatch(batch)
				if decodeErr != nil {
					t.Fatal(decodeErr)
				}
				err = errors.Join(err, r.apply(events, number, &changes{}))
			}
			if !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			if got := subscriptionsOf(r).Cached(test.prompt)[Place{"pod:1", 0}]; got != test.want {
				t.Errorf("%d tokens are cached, want %d", got, test.want)
			}
		})
	}
}

// TestUnknownRanks checks that only ranks with complete events are in a result.
func TestUnknownRanks(t *testing.T) {
	live, down, grouped := newTestRank(0), newTestRank(0), newTestRank(0)
	live.setLive(true)
	grouped.setLive(true)
	events, _, err := decodeBatch(kveventstest.Batch(0, kveventstest.StoredArray(-1, []int64{10}, []int32{1, 2}, 2, "GPU", nil, nil, 1)))
	if err != nil {
		t.Fatal(err)
	}
	if err := grouped.apply(events, 0, &changes{}); !errors.Is(err, errGroups) {
		t.Errorf("error %v, want %v", err, errGroups)
	}
	got := subscriptionsOf(live, down, grouped).Cached(promptOf(1, 2, 3))
	if tokens, known := got[Place{"pod:1", 0}]; !known || tokens != 0 || len(got) != 1 {
		t.Errorf("got %v, want 0 tokens of rank 0 only", got)
	}
}

// TestReadsNoMoreTokensThanNeeded checks that a long prompt is tokenized only as far as a rank has it.
func TestReadsNoMoreTokensThanNeeded(t *testing.T) {
	r := newTestRank(0)
	r.setLive(true)
	events, _, err := decodeBatch(kveventstest.Batch(0, kveventstest.Stored(-1, numbers[int64](10, 4), numbers[int32](0, 64), 16)))
	if err != nil || r.apply(events, 0, &changes{}) != nil {
		t.Fatal("the blocks cannot be stored")
	}
	most := 0
	prompt := Prompt{Tokens: func(n int) []int32 {
		most = max(most, n)
		return numbers[int32](0, 10_000)
	}}
	if got := subscriptionsOf(r).Cached(prompt)[Place{"pod:1", 0}]; got != 64 || most != 81 {
		t.Errorf("%d tokens are cached and %d were read; want 64 and 81", got, most)
	}
}

// TestBlocksAreBounded checks that blocks above the bound are counted and not kept, and that room returns.
func TestBlocksAreBounded(t *testing.T) {
	r := newTestRank(0)
	r.setLive(true)
	var done changes
	store := func(first int64, n int) {
		e := event{kind: stored, hashes: make([]uint64, n), tokens: make([]int32, n), size: 1, group: noGroup}
		for i := range e.hashes {
			e.hashes[i], e.tokens[i] = uint64(first+int64(i)), int32(i)
		}
		if err := r.apply([]event{e}, noRank, &done); err != nil {
			t.Fatal(err)
		}
	}
	store(0, maxRankBlocks+10)
	if len(r.blocks) != maxRankBlocks || done.full != 10 || r.total.Load() != maxRankBlocks {
		t.Errorf("%d blocks are kept and %d refused", len(r.blocks), done.full)
	}
	r.forget()
	if r.total.Load() != 0 {
		t.Errorf("%d blocks are counted after all were forgotten", r.total.Load())
	}
	r.total.Store(maxBlocks)
	store(0, 5)
	if len(r.blocks) != 0 || done.full != 15 {
		t.Errorf("%d blocks are kept and %d refused above the bound of all ranks", len(r.blocks), done.full)
	}
}

// BenchmarkCached looks up a prompt of 8,192 tokens on 16 ranks that have cached all of it, in blocks of 16.
func BenchmarkCached(b *testing.B) {
	ids := numbers[int32](0, 8193)
	events, _, err := decodeBatch(kveventstest.Batch(0, kveventstest.Stored(-1, numbers[int64](1, 512), ids[:8192], 16)))
	if err != nil {
		b.Fatal(err)
	}
	var ranks []*rank
	for range 16 {
		r := newTestRank(0)
		r.setLive(true)
		if err := r.apply(events, noRank, &changes{}); err != nil {
			b.Fatal(err)
		}
		ranks = append(ranks, r)
	}
	s, prompt := subscriptionsOf(ranks...), promptOf(ids...)
	for b.Loop() {
		if got := s.Cached(prompt); len(got) != 16 || got[Place{"pod:1", 3}] != 8192 {
			b.Fatalf("%v", got)
		}
	}
}
