// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/semmoe/operator/internal/router/kvevents/kveventstest"
)

func TestDecodesBothEncodings(t *testing.T) {
	four := []int32{1, 2, 3, 4}
	want := event{kind: stored, hashes: []uint64{10, 11}, tokens: four, size: 2, medium: "GPU", group: noGroup}
	child := want
	child.parent, child.hasParent = 9, true
	bare := want
	bare.medium = ""
	lora, keyed, grouped, odd := bare, want, want, want
	lora.keyed, lora.adapter, keyed.keyedBlocks, odd.keyed = true, "lora", []int{1}, true
	grouped.group = 1
	negative := bare
	negative.hashes = []uint64{math.MaxUint64 - 1, 11}
	for name, test := range map[string]struct {
		event kveventstest.Event
		want  event
	}{
		"a map, as vLLM 0.32 and SGLang 0.5.23 send it": {kveventstest.Stored(-1, []int64{10, 11}, four, 2), want},
		"a map with a parent":                           {kveventstest.Stored(9, []int64{10, 11}, four, 2), child},
		"an array, as SGLang 0.5.12 sends it":           {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2), bare},
		"a hash with the highest bit":                   {kveventstest.StoredArray(-1, []int64{-2, 11}, four, 2), negative},
		"an array with a medium":                        {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, "GPU"), want},
		"an array with a LoRA name":                     {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, nil, "lora"), lora},
		"an array with keys of the second block":        {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, "GPU", nil, []any{nil, []any{"image"}}), keyed},
		"an array without keys of blocks":               {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, "GPU", nil, []any{nil, []any{}}), want},
		"another kind of keys":                          {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, "GPU", nil, "session"), odd},
		"a group, and elements of the future":           {kveventstest.StoredArray(-1, []int64{10, 11}, four, 2, "GPU", nil, nil, 1, "full", 4096, true), grouped},
		"removed":                                       {kveventstest.Removed(10), event{kind: removed, hashes: []uint64{10}, medium: "GPU", group: noGroup}},
		"removed, an array":                             {kveventstest.RemovedArray("CPU_PINNED", 10), event{kind: removed, hashes: []uint64{10}, medium: "CPU_PINNED", group: noGroup}},
		"cleared":                                       {kveventstest.Cleared(), event{kind: cleared, group: noGroup}},
		"a kind of the future":                          {msgp.AppendInt(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "BlockTransferred"), 1), event{group: noGroup}},
		"pairs of draft models":                         {pairs(), event{kind: stored, hashes: []uint64{10}, tokens: []int32{1, 2}, size: 2, group: noGroup}},
		"a token above an int32":                        {kveventstest.Event(bigToken()), event{kind: stored, hashes: []uint64{10}, tokens: []int32{outside}, size: 1, group: noGroup}},
	} {
		t.Run(name, func(t *testing.T) {
			events, rank, err := decodeBatch(kveventstest.Batch(3, test.event))
			if err != nil || rank != 3 {
				t.Fatalf("rank %d, error %v", rank, err)
			}
			if difference := cmp.Diff([]event{test.want}, events, cmp.AllowUnexported(event{})); difference != "" {
				t.Error(difference)
			}
		})
	}
}

// pairs is an event with pairs of tokens.
func pairs() kveventstest.Event {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 6), "BlockStored")
	b = msgp.AppendNil(msgp.AppendInt(msgp.AppendArrayHeader(b, 1), 10))
	b = msgp.AppendArrayHeader(b, 2)
	for token := range 2 {
		b = msgp.AppendInt(msgp.AppendInt(msgp.AppendArrayHeader(b, 2), token+1), token+2)
	}
	return msgp.AppendNil(msgp.AppendInt(b, 2))
}

func bigToken() []byte {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 6), "BlockStored")
	b = msgp.AppendNil(msgp.AppendInt(msgp.AppendArrayHeader(b, 1), 10))
	b = msgp.AppendUint64(msgp.AppendArrayHeader(b, 1), math.MaxUint64)
	return msgp.AppendNil(msgp.AppendInt(b, 1))
}

// TestDecodesHashesOfBytes checks that equal hashes of bytes are equal, and different ones differ.
func TestDecodesHashesOfBytes(t *testing.T) {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 2), "BlockRemoved")
	b = msgp.AppendArrayHeader(b, 3)
	for _, hash := range []string{"a", "b", "a"} {
		b = msgp.AppendBytes(b, bytes.Repeat([]byte(hash), 32))
	}
	events, _, err := decodeBatch(kveventstest.Batch(-1, b))
	if err != nil || len(events) != 1 || len(events[0].hashes) != 3 {
		t.Fatalf("%+v, error %v", events, err)
	}
	if h := events[0].hashes; h[0] != h[2] || h[0] == h[1] {
		t.Errorf("hashes %x", h)
	}
}

func TestRefusesMalformedBatches(t *testing.T) {
	good := kveventstest.Batch(0, kveventstest.Stored(-1, []int64{1, 2}, []int32{1, 2, 3, 4}, 2))
	for cut := range len(good) {
		if _, _, err := decodeBatch(good[:cut]); !errors.Is(err, errMalformed) {
			t.Errorf("%d of %d bytes: error %v", cut, len(good), err)
		}
	}
	for name, test := range map[string]struct {
		payload []byte
		want    string
	}{
		"no batch":            {[]byte("hello"), "want [time, events, rank]"},
		"too few tokens":      {kveventstest.Batch(0, kveventstest.Stored(-1, []int64{1, 2}, []int32{1, 2, 3}, 2)), "3 tokens in 2 blocks of 2"},
		"no block size":       {kveventstest.Batch(0, kveventstest.Stored(-1, nil, nil, 0)), "block_size 0"},
		"a huge block size":   {kveventstest.Batch(0, kveventstest.Stored(-1, nil, nil, 1<<20)), "1048576 is more than 65536"},
		"a negative size":     {kveventstest.Batch(0, kveventstest.Stored(-1, nil, nil, -1)), "-1 is outside"},
		"more than there is":  {append(msgp.AppendInt(msgp.AppendArrayHeader(nil, 3), 1), 0xdd, 0xff, 0xff, 0xff, 0xff), "4294967295 elements in 0 bytes"},
		"events of numbers":   {msgp.AppendNil(msgp.AppendInt(msgp.AppendArrayHeader(msgp.AppendInt(msgp.AppendArrayHeader(nil, 3), 1), 1), 1)), "want an array or a map"},
		"too many events":     {append(msgp.AppendArrayHeader(msgp.AppendInt(msgp.AppendArrayHeader(nil, 3), 1), maxEvents+1), make([]byte, maxEvents+1)...), "65537 events; want 65536 at most"},
		"a negative rank":     {msgp.AppendInt(msgp.AppendArrayHeader(msgp.AppendInt(msgp.AppendArrayHeader(nil, 3), 1), 0), -7), "rank"},
		"a medium of a novel": {kveventstest.Batch(0, kveventstest.RemovedArray(strings.Repeat("GPU", 100), 1)), "a text of 300 bytes"},
	} {
		if _, _, err := decodeBatch(test.payload); !errors.Is(err, errMalformed) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}

func FuzzDecodeBatch(f *testing.F) {
	f.Add(kveventstest.Batch(0, kveventstest.Stored(-1, []int64{1, 2}, []int32{1, 2, 3, 4}, 2), kveventstest.Removed(1), kveventstest.Cleared()))
	f.Add(kveventstest.Batch(-1, kveventstest.StoredArray(7, []int64{1}, []int32{1}, 1, "GPU", nil, []any{[]any{"image"}}, 1), pairs()))
	f.Fuzz(func(t *testing.T, payload []byte) {
		events, rank, err := decodeBatch(payload)
		if err != nil {
			return
		}
		if rank < noRank {
			t.Fatalf("rank %d", rank)
		}
		r, done := newTestRank(0), changes{}
		r.setLive(true)
		_ = r.apply(events, rank, &done) // any error is allowed
		if blocks := r.total.Load(); blocks != int64(len(r.blocks)) || len(r.held) > len(r.blocks) || blocks > int64(len(payload)) {
			t.Fatalf("%d blocks are counted, %d known and %d held, from %d bytes", blocks, len(r.blocks), len(r.held), len(payload))
		}
	})
}
