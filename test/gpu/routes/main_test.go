// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func TestFile(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	o := &options{ranks: []int{2, 4}, layers: []int{1}, prefill: []int{64}, decode: []int{8}, trainPercent: 20, seed: 1}
	f, err := o.collect(t.Context(), tr)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := f.write(&out); err != nil {
		t.Fatal(err)
	}
	content := out.Bytes()
	length := binary.LittleEndian.Uint64(content)
	header, err := checkpoint.ParseHeader(content[8 : 8+length])
	if err != nil {
		t.Fatal(err)
	}
	if header.Metadata["format"] != format || header.Metadata["batches"] != `[{"name":"prefill.64","phase":"prefill","tokens":64},{"name":"decode.8","phase":"decode","tokens":8}]` {
		t.Errorf("metadata is %v", header.Metadata)
	}
	raw := func(name string) []byte {
		entry, found := header.Tensors[name]
		if !found {
			t.Fatalf("there is no tensor %q", name)
		}
		return content[8+int64(length):][entry.Begin:entry.End]
	}
	for _, ranks := range o.ranks {
		if slots := slices.Sorted(slices.Values(raw(fmt.Sprintf("slots.ep%d", ranks)))); len(slots) != tr.Model.Experts || slots[len(slots)-1] != byte(tr.Model.Experts-1) {
			t.Errorf("EP %d: the slots hold %v", ranks, slots)
		}
		for _, b := range []struct {
			name   string
			tokens int
		}{{"prefill.64", 64}, {"decode.8", 8}} {
			local := map[string]int{}
			for _, method := range []string{"table", "prefill", "oracle", "activation", "eplb"} {
				dealt := raw(fmt.Sprintf("ranks.ep%d.%s.%s", ranks, b.name, method))
				for rank := range ranks {
					if n := bytes.Count(dealt, []byte{byte(rank)}); n != b.tokens/ranks {
						t.Errorf("EP %d, %s, %s: rank %d has %d tokens; want %d", ranks, b.name, method, rank, n, b.tokens/ranks)
					}
				}
				slots := fmt.Sprintf("slots.ep%d", ranks)
				if method == "activation" || method == "eplb" {
					slots += "." + method
				}
				local[method] = localRows(raw("experts."+b.name), raw(slots), dealt, ranks)
			}
			if local["oracle"] < max(local["table"], local["prefill"]) {
				t.Errorf("EP %d, %s: local rows are %v: a forecast is better than the routes themselves", ranks, b.name, local)
			}
		}
	}
}

// localRows counts the activations of a batch with the expert on the token's rank.
func localRows(experts, slots, dealt []byte, ranks int) int {
	local, topK := 0, len(experts)/len(dealt)
	for i, expert := range experts {
		if slot := bytes.IndexByte(slots, expert); slot/(len(slots)/ranks) == int(dealt[i/topK]) {
			local++
		}
	}
	return local
}

func TestRefusals(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for name, test := range map[string]struct {
		options options
		want    string
	}{
		"no such layer":   {options{layers: []int{99}}, "--layers: MoE layer 99"},
		"unequal shards":  {options{ranks: []int{4}, prefill: []int{66}}, "66 tokens cannot be split into equal shards for 4 ranks"},
		"a single rank":   {options{ranks: []int{1}, decode: []int{8}}, "--ep must be 2 or more"},
		"too many tokens": {options{ranks: []int{2}, decode: []int{100000}, trainPercent: 20}, "--decode has a batch of 100000 tokens"},
	} {
		if _, err := test.options.collect(t.Context(), tr); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
	}
	for _, arguments := range [][]string{{}, {"--trace", "x"}, {"--trace", "x", "--out", "y", "z"}, {"--trace", "x", "--out", "y", "--ep", "2,x"}} {
		if _, err := parse(arguments); err == nil {
			t.Errorf("%q is accepted", arguments)
		}
	}
}
