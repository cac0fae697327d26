// SPDX-License-Identifier: Apache-2.0

package counts

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

var small = Model{Digest: "sha256:abc", MoELayers: []int{1, 2, 5}, Experts: 40, ExpertsPerToken: 4, Vocabulary: 300}

// draw returns n tokens with a skewed distribution, and the experts that each token activates.
func draw(random *rand.Rand, m Model, n int) (tokens []int32, experts []uint16) {
	for range n {
		token := int32(float64(m.Vocabulary) * random.Float64() * random.Float64() * random.Float64())
		tokens = append(tokens, token)
		for range m.MoELayers {
			begin := (int(token) + random.IntN(5)) % m.Experts
			for k := range m.ExpertsPerToken {
				experts = append(experts, uint16((begin+7*k)%m.Experts))
			}
		}
	}
	return tokens, experts
}

func counted(random *rand.Rand, m Model, n int) *Counts {
	c := New(m)
	c.Add(draw(random, m, n))
	return c
}

// equal reports whether two counts write the same bytes.
func equal(t *testing.T, a, b *Counts) bool {
	t.Helper()
	return bytes.Equal(written(t, a), written(t, b))
}

func written(t testing.TB, c *Counts) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := c.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestPairCounts checks that the counts do not depend on the order of pairs and the number of merges.
func TestPairCounts(t *testing.T) {
	for _, n := range []int{0, 1, minPending - 1, minPending, 20*minPending + 17} {
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
				t.Fatalf("%d pairs: pair %d is not in ascending order", n, i)
			}
			got[p] = c.counts[i]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d pairs (-want +got):\n%s", n, diff)
		}
	}
}

// tensors reads the header of plain safetensors, and each tensor as integers.
func tensors(t *testing.T, content []byte) (map[string]string, map[string][]uint64) {
	t.Helper()
	begin := 8 + binary.LittleEndian.Uint64(content)
	header, err := checkpoint.ParseHeader(content[8:begin])
	if err != nil {
		t.Fatal(err)
	}
	if begin%8 != 0 || header.DataBytes() != int64(uint64(len(content))-begin) {
		t.Errorf("the data starts at %d and has %d bytes; the header declares %d", begin, uint64(len(content))-begin, header.DataBytes())
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

// TestFile checks that a file contains the counts in the tensors of docs/trace-format.md.
func TestFile(t *testing.T) {
	tokens, experts := draw(rand.New(rand.NewPCG(1, 1)), small, 2000)
	c := New(small)
	c.Add(tokens[:700], experts[:700*12])
	c.Add(tokens[700:], experts[700*12:])
	metadata, got := tensors(t, written(t, c))
	want := map[string]string{
		"format": Format, "model_digest": "sha256:abc", "tokens": "2000", "num_experts": "40", "num_experts_per_tok": "4", "vocab_size": "300", "moe_layers": "[1,2,5]",
	}
	if diff := cmp.Diff(want, metadata); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	occurrences := map[int32]uint64{}
	for _, token := range tokens {
		occurrences[token]++
	}
	ids := got["token_ids"]
	if len(ids) != len(occurrences) || len(ids) != c.Distinct() {
		t.Fatalf("%d token ids, want %d", len(ids), len(occurrences))
	}
	for i, id := range ids {
		if i > 0 && id <= ids[i-1] || got["token_counts"][i] != occurrences[int32(id)] {
			t.Fatalf("row %d: token %d has count %d, want %d", i, id, got["token_counts"][i], occurrences[int32(id)])
		}
	}
	busiest := 0.0
	for layer, index := range small.MoELayers {
		want, loads := map[[2]uint64]uint64{}, make([]float64, small.Experts)
		for position, token := range tokens {
			for _, expert := range experts[(position*3+layer)*4 : (position*3+layer)*4+4] {
				want[[2]uint64{uint64(token), uint64(expert)}]++
				loads[expert]++
			}
		}
		highest := 0.0
		for _, load := range loads {
			highest = max(highest, load)
		}
		busiest += highest / (2000 * 4 / 40.) / 3
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
	if skew := c.Skew(); skew < busiest-1e-9 || skew > busiest+1e-9 {
		t.Errorf("skew = %v, want %v", skew, busiest)
	}
}

// TestRoundTrip checks that files are read as they were written, bounded or not, compressed or not.
func TestRoundTrip(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 2))
	for _, n := range []int{0, 1, 3000} {
		plain, bounded := counted(random, small, n), NewBounded(small, 500)
		for range n / 10 {
			tokens, experts := draw(random, small, 10)
			bounded.Add(tokens, experts)
			bounded.AddBigrams(tokens)
		}
		for _, c := range []*Counts{plain, bounded} {
			path := filepath.Join(t.TempDir(), "counts.safetensors.zst")
			if err := c.Create(path); err != nil {
				t.Fatal(err)
			}
			file, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			back, err := ReadCompressed(file, 1<<22)
			if err != nil {
				t.Fatal(err)
			}
			if !equal(t, c, back) || back.Tokens() != c.Tokens() || (back.bigrams == nil) != (c == plain) {
				t.Errorf("%d tokens: the counts that are read differ from those that were written", n)
			}
		}
	}
	if _, err := read(bytes.NewReader(written(t, counted(random, small, 100))), 1000); err == nil {
		t.Error("Read accepts a file above the limit")
	}
}

// TestMerge checks that the counts of parts sum to the counts of the whole, in any order and grouping.
func TestMerge(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	for range 8 {
		all, parts := NewBounded(small, 1<<20), make([]*Counts, 1+random.IntN(4))
		for i := range parts {
			parts[i] = NewBounded(small, 1<<20)
			for range random.IntN(4) {
				tokens, experts := draw(random, small, random.IntN(200))
				for _, c := range []*Counts{all, parts[i]} {
					c.Add(tokens, experts)
					c.AddBigrams(tokens)
				}
			}
		}
		for len(parts) > 1 {
			random.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
			before := written(t, parts[1])
			if err := parts[0].Merge(parts[1]); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(before, written(t, parts[1])) {
				t.Fatal("Merge changes its argument")
			}
			parts = append(parts[:1], parts[2:]...)
		}
		if !equal(t, all, parts[0]) {
			t.Fatal("the sum of the parts differs from the whole")
		}
	}
	other := small
	other.Digest = "sha256:other"
	if err := New(small).Merge(New(other)); err == nil {
		t.Error("Merge accepts counts of another model")
	}
}

// TestBound checks that the limit holds after each request, that remaining rows are complete, and that no token lacks
// more occurrences than Dropped returns.
func TestBound(t *testing.T) {
	const limit = 2000
	random := rand.New(rand.NewPCG(4, 4))
	c, exact := NewBounded(small, limit), New(small)
	for range 2000 {
		tokens, experts := draw(random, small, 1+random.IntN(10))
		c.Add(tokens, experts)
		exact.Add(tokens, experts)
		if c.size() > limit {
			t.Fatalf("%d pairs are stored, the limit is %d", c.size(), limit)
		}
	}
	dropped, undercount := c.dropped, c.undercount
	if dropped == 0 || c.Tokens()+dropped != exact.Tokens() {
		t.Errorf("%d tokens are counted and %d dropped, want a sum of %d", c.Tokens(), dropped, exact.Tokens())
	}
	for id := range int32(small.Vocabulary) {
		if got, want := int64(c.occurrences[id]), int64(exact.occurrences[id]); got > want || want-got > undercount {
			t.Errorf("token %d has count %d of %d; the maximum undercount is %d", id, got, want, undercount)
		}
	}
	if c.occurrences[0] < exact.occurrences[0]*9/10 {
		t.Errorf("the most frequent token has count %d, want %d", c.occurrences[0], exact.occurrences[0])
	}
	for layer := range small.MoELayers {
		sums := map[int32]uint32{}
		c.ForEach(layer, func(token int32, _ uint16, n uint32) { sums[token] += n })
		for id := range int32(small.Vocabulary) {
			if sums[id] != 4*c.occurrences[id] {
				t.Fatalf("layer %d, token %d: %d activations for %d occurrences", layer, id, sums[id], c.occurrences[id])
			}
		}
	}
}

// TestBigrams checks that a count of bigrams is never too low, and rarely much too high.
func TestBigrams(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 5))
	c := NewBounded(Model{MoELayers: []int{0}, Experts: 1, ExpertsPerToken: 1, Vocabulary: 150_000}, 10)
	want := map[[2]int32]uint32{}
	total := 0
	for range 2000 {
		sequence := make([]int32, 100)
		for i := range sequence {
			sequence[i] = int32(150_000 * random.Float64() * random.Float64() * random.Float64())
			if i > 0 {
				want[[2]int32{sequence[i-1], sequence[i]}]++
				total++
			}
		}
		c.AddBigrams(sequence)
	}
	high, allowed := 0, uint32(2.72*float64(total)/bigramBuckets)
	for pair, n := range want {
		got := c.bigrams.Count(pair[0], pair[1])
		if got < n {
			t.Fatalf("bigram %v has count %d, but occurred %d times", pair, got, n)
		}
		if got > n+allowed {
			high++
		}
	}
	if high > len(want)*2/100 {
		t.Errorf("%d of %d bigrams have counts that are too high by more than %d", high, len(want), allowed)
	}
}

func TestRefusedFiles(t *testing.T) {
	good := written(t, counted(rand.New(rand.NewPCG(6, 6)), Model{MoELayers: []int{0}, Experts: 8, ExpertsPerToken: 2, Vocabulary: 10}, 20))
	if _, err := read(bytes.NewReader(good), 1<<20); err != nil {
		t.Fatal(err)
	}
	replace := func(old, with string) []byte { return bytes.Replace(good, []byte(old), []byte(with), 1) }
	last := len(good) - 1
	for name, data := range map[string][]byte{
		"empty":         {},
		"cut":           good[:last],
		"header beyond": binary.LittleEndian.AppendUint64(nil, 1<<40),
		"format":        replace("semmoe-counts/1", "semmoe-counts/2"),
		"tokens":        replace(`"tokens":"20"`, `"tokens":"21"`),
		"experts":       replace(`"num_experts":"8"`, `"num_experts":"1"`),
		"top":           replace(`"num_experts_per_tok":"2"`, `"num_experts_per_tok":"3"`),
		"vocabulary":    replace(`"vocab_size":"10"`, `"vocab_size":"-1"`),
		"layers":        replace(`"moe_layers":"[0]"`, `"moe_layers":"[1]"`),
		"type":          replace(`"dtype":"U16"`, `"dtype":"I16"`),
		"expert id":     append(bytes.Clone(good[:last]), 0xff),
	} {
		if _, err := read(bytes.NewReader(data), 1<<20); err == nil {
			t.Errorf("%s: Read accepts the file, want an error", name)
		}
	}
}

// FuzzRead checks that counts that are read can be written, merged and read again.
func FuzzRead(f *testing.F) {
	random := rand.New(rand.NewPCG(7, 7))
	tiny := Model{MoELayers: []int{0, 3}, Experts: 8, ExpertsPerToken: 2, Vocabulary: 10}
	f.Add(written(f, counted(random, tiny, 5)))
	f.Add(written(f, counted(random, tiny, 0)))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := read(bytes.NewReader(data), 1<<16)
		if err != nil {
			return
		}
		back, err := read(bytes.NewReader(written(t, c)), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c, back, cmp.AllowUnexported(Counts{}, pairCounts{}, run{}), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("the file that is read differs from the written one:\n%s", diff)
		}
		if err := c.Merge(back); err != nil || c.Tokens() != 2*back.Tokens() {
			t.Fatalf("%d tokens, %d after merging twice, error %v", c.Tokens(), back.Tokens(), err)
		}
	})
}
