package profile

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/klauspost/compress/zstd"

	"github.com/semmoe/operator/internal/checkpoint"
)

// CountsFormat is the value of "format" in the metadata of a counts file.
const CountsFormat = "semmoe-counts/1"

// minPending is how many activations a layer gathers before they are merged into its counts.
const minPending = 1 << 16

// counts are, for each MoE layer, how often each token id activated each expert. Memory follows the number of different
// pairs, 12 bytes each, not the number of tokens.
type counts struct {
	report checkpoint.Report
	// tokens is how many tokens were added, occurrences how often each id was among them [vocabulary].
	tokens      int64
	occurrences []uint32
	layers      []pairCounts
	// loads is how often each expert was activated [MoE layers * experts].
	loads []int64
}

func newCounts(report checkpoint.Report) *counts {
	return &counts{
		report: report, occurrences: make([]uint32, report.Vocab),
		layers: make([]pairCounts, len(report.MoELayers)), loads: make([]int64, len(report.MoELayers)*report.Experts),
	}
}

// add counts the activations of tokens; experts is [tokens, MoE layers, experts per token].
func (c *counts) add(tokens []int32, experts []uint16) {
	top := c.report.ExpertsPerToken
	at := 0
	for _, token := range tokens {
		c.occurrences[token]++
		for layer := range c.layers {
			for _, expert := range experts[at : at+top] {
				c.layers[layer].add(pairOf(token, expert))
				c.loads[layer*c.report.Experts+int(expert)]++
			}
			at += top
		}
	}
	c.tokens += int64(len(tokens))
}

// distinct is the number of different token ids.
func (c *counts) distinct() int {
	n := 0
	for _, occurrences := range c.occurrences {
		if occurrences > 0 {
			n++
		}
	}
	return n
}

// skew is the load of a layer's busiest expert over the mean, averaged over layers.
func (c *counts) skew() float64 {
	mean := float64(c.tokens) * float64(c.report.ExpertsPerToken) / float64(c.report.Experts)
	sum := 0.0
	for layer := range c.layers {
		sum += float64(slices.Max(c.loads[layer*c.report.Experts:(layer+1)*c.report.Experts])) / mean
	}
	return sum / float64(len(c.layers))
}

// pair is a token id and an expert, ordered by token, then expert.
type pair uint64

func pairOf(token int32, expert uint16) pair { return pair(token)<<16 | pair(expert) }
func (p pair) token() int32                  { return int32(p >> 16) }
func (p pair) expert() uint16                { return uint16(p) }

// pairCounts counts pairs: a sorted run with counts, and pairs that are still to be merged into it.
type pairCounts struct {
	pairs   []pair
	counts  []uint32
	pending []pair
}

func (c *pairCounts) add(p pair) {
	c.pending = append(c.pending, p)
	// A merge costs as much as the run is long: it pays once as much has come anew.
	if len(c.pending) >= max(minPending, len(c.pairs)/2) {
		c.merge()
	}
}

func (c *pairCounts) merge() {
	if len(c.pending) == 0 {
		return
	}
	slices.Sort(c.pending)
	pairs, counts := make([]pair, 0, len(c.pairs)+len(c.pending)/4), make([]uint32, 0, len(c.pairs)+len(c.pending)/4)
	old, fresh := 0, 0
	for old < len(c.pairs) || fresh < len(c.pending) {
		var next pair
		if fresh == len(c.pending) || old < len(c.pairs) && c.pairs[old] <= c.pending[fresh] {
			next = c.pairs[old]
		} else {
			next = c.pending[fresh]
		}
		n := uint32(0)
		if old < len(c.pairs) && c.pairs[old] == next {
			n = c.counts[old]
			old++
		}
		for fresh < len(c.pending) && c.pending[fresh] == next {
			n++
			fresh++
		}
		pairs, counts = append(pairs, next), append(counts, n)
	}
	c.pairs, c.counts, c.pending = pairs, counts, c.pending[:0]
}

// create writes the counts to a zstd-compressed safetensors file, which appears complete or not at all.
func (c *counts) create(path string) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			file.Close()
			os.Remove(file.Name())
		}
	}()
	encoder, err := zstd.NewWriter(file, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	if err = errors.Join(c.write(encoder), encoder.Close()); err != nil {
		return err
	}
	if err = errors.Join(file.Chmod(0o644), file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// write writes the counts as safetensors: rows are the token ids that occurred, in compressed sparse rows per layer
// (docs/formats.md).
func (c *counts) write(w io.Writer) error {
	var tokens []int32
	for id, occurrences := range c.occurrences {
		if occurrences > 0 {
			tokens = append(tokens, int32(id))
		}
	}
	for layer := range c.layers {
		c.layers[layer].merge()
	}
	header, err := c.header(len(tokens))
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(w, 1<<20)
	put := func(value uint64, width int) {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], value)
		out.Write(word[:width]) // the error stays until Flush
	}
	put(uint64(len(header)), 8)
	out.Write(header)
	for layer := range c.layers { // in the order of header: wide elements first
		l, next := c.layers[layer], 0
		put(0, 8)
		for _, token := range tokens {
			for next < len(l.pairs) && l.pairs[next].token() == token {
				next++
			}
			put(uint64(next), 8)
		}
	}
	for _, token := range tokens {
		put(uint64(token), 4)
	}
	for _, token := range tokens {
		put(uint64(c.occurrences[token]), 4)
	}
	for layer := range c.layers {
		for _, n := range c.layers[layer].counts {
			put(uint64(n), 4)
		}
	}
	for layer := range c.layers {
		for _, p := range c.layers[layer].pairs {
			put(uint64(p.expert()), 2)
		}
	}
	return out.Flush()
}

// header lists the tensors in the order of write.
func (c *counts) header(tokens int) ([]byte, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int    `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	layers, err := json.Marshal(c.report.MoELayers)
	if err != nil {
		return nil, err
	}
	object := map[string]any{"__metadata__": map[string]string{
		"format": CountsFormat, "model_digest": c.report.ModelDigest, "tokens": strconv.FormatInt(c.tokens, 10),
		"num_experts": strconv.Itoa(c.report.Experts), "num_experts_per_tok": strconv.Itoa(c.report.ExpertsPerToken),
		"vocab_size": strconv.Itoa(c.report.Vocab), "moe_layers": string(layers),
	}}
	end := int64(0)
	add := func(name, dtype string, width, length int) {
		begin := end
		end += int64(width) * int64(length)
		object[name] = entry{dtype, []int{length}, [2]int64{begin, end}}
	}
	each := func(name, dtype string, width int, length func(layer int) int) {
		for layer, index := range c.report.MoELayers {
			add(fmt.Sprintf("layer.%d.%s", index, name), dtype, width, length(layer))
		}
	}
	pairs := func(layer int) int { return len(c.layers[layer].pairs) }
	each("row_offsets", "I64", 8, func(int) int { return tokens + 1 })
	add("token_ids", "I32", 4, tokens)
	add("token_counts", "U32", 4, tokens)
	each("counts", "U32", 4, pairs)
	each("experts", "U16", 2, pairs)
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	return text, nil
}
