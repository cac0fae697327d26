package profile

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/solver/trace"
)

// tensors reads a counts file: its metadata, and each tensor as integers.
func tensors(t *testing.T, path string) (map[string]string, map[string][]uint64) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	decoder, err := zstd.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	defer decoder.Close()
	content, err := io.ReadAll(decoder)
	if err != nil {
		t.Fatal(err)
	}
	begin := 8 + binary.LittleEndian.Uint64(content)
	header, err := checkpoint.ParseHeader(content[8:begin])
	if err != nil {
		t.Fatal(err)
	}
	if begin%8 != 0 || header.DataBytes() != int64(uint64(len(content))-begin) {
		t.Errorf("the data begins at %d and has %d bytes; the header tells %d", begin, uint64(len(content))-begin, header.DataBytes())
	}
	all := map[string][]uint64{}
	for name, tensor := range header.Tensors {
		width := (tensor.End - tensor.Begin) / max(1, tensor.Elements())
		values := make([]uint64, tensor.Elements())
		for i := range values {
			var word [8]byte
			copy(word[:width], content[int64(begin)+tensor.Begin+int64(i)*width:])
			values[i] = binary.LittleEndian.Uint64(word[:])
		}
		all[name] = values
	}
	return header.Metadata, all
}

// checkCounts compares the file of counts with what a trace of the same tokens says.
func checkCounts(t *testing.T, c *counts, of *trace.Trace) {
	t.Helper()
	path := filepath.Join(t.TempDir(), CountsFile)
	if err := c.create(path); err != nil {
		t.Fatal(err)
	}
	metadata, got := tensors(t, path)
	if metadata["format"] != CountsFormat || metadata["tokens"] != fmt.Sprint(len(of.Tokens)) || metadata["moe_layers"] == "" {
		t.Errorf("metadata %v", metadata)
	}
	occurrences := map[int32]uint64{}
	for _, token := range of.Tokens {
		occurrences[token]++
	}
	ids := got["token_ids"]
	if len(ids) != len(occurrences) {
		t.Fatalf("%d token ids, want %d", len(ids), len(occurrences))
	}
	for i, id := range ids {
		if i > 0 && id <= ids[i-1] || got["token_counts"][i] != occurrences[int32(id)] {
			t.Fatalf("row %d: token %d, %d times; want %d times", i, id, got["token_counts"][i], occurrences[int32(id)])
		}
	}
	for layer, index := range of.Model.Layers {
		want := map[[2]uint64]uint64{}
		for position, token := range of.Tokens {
			for _, expert := range of.Row(position, layer) {
				want[[2]uint64{uint64(token), uint64(expert)}]++
			}
		}
		found := map[[2]uint64]uint64{}
		part := func(name string) []uint64 { return got[fmt.Sprintf("layer.%d.%s", index, name)] }
		for row, id := range ids {
			for i := part("row_offsets")[row]; i < part("row_offsets")[row+1]; i++ {
				found[[2]uint64{id, part("experts")[i]}] += part("counts")[i]
			}
		}
		if diff := cmp.Diff(want, found); diff != "" {
			t.Fatalf("layer %d (-want +got):\n%s", index, diff)
		}
	}
}

// However the pairs come in, and however often they are merged, the counts are theirs.
func TestPairCounts(t *testing.T) {
	for _, n := range []int{0, 1, minPending - 1, minPending, 5*minPending + 17} {
		random := rand.New(rand.NewPCG(uint64(n), 1))
		var c pairCounts
		want := map[pair]uint32{}
		for range n {
			p := pairOf(int32(random.IntN(3000)), uint16(random.IntN(40)))
			c.add(p)
			want[p]++
		}
		c.merge()
		got := map[pair]uint32{}
		for i, p := range c.pairs {
			if i > 0 && p <= c.pairs[i-1] {
				t.Fatalf("%d pairs: not ascending at %d", n, i)
			}
			got[p] = c.counts[i]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d pairs (-want +got):\n%s", n, diff)
		}
	}
}

// The reservoir stays within its limit, wastes no more than a request of it, keeps the order of the data set, and gives
// short and long requests the same chance.
func TestReservoir(t *testing.T) {
	const limit, requests, seeds = 1000, 200, 400
	kept := map[int]int{} // by length
	for seed := range uint64(seeds) {
		r := newReservoir(limit, seed)
		for i := range requests {
			r.add(&recorded{item: i, tokens: make([]int32, []int{5, 50}[i%2])})
		}
		tokens, last := 0, -1
		for _, request := range r.requests() {
			if request.item <= last {
				t.Fatalf("seed %d: item %d follows %d", seed, request.item, last)
			}
			last = request.item
			tokens += len(request.tokens)
			kept[len(request.tokens)]++
		}
		if tokens != r.tokens || tokens > limit || tokens <= limit-50 {
			t.Fatalf("seed %d: %d tokens of at most %d, said to be %d", seed, tokens, limit, r.tokens)
		}
	}
	if short, long := kept[5], kept[50]; short < long*95/100 || short > long*110/100 {
		t.Errorf("%d short and %d long requests were kept: want about as many", short, long)
	}
}
