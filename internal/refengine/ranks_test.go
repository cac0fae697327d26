// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func decodeRoutes(t *testing.T, wire string, layers, topK int) [][][]int32 {
	t.Helper()
	raw, err := base64.StdEncoding.DecodeString(wire)
	if err != nil || len(raw)%(4*layers*topK) != 0 {
		t.Fatalf("%d bytes of routes, %v", len(raw), err)
	}
	values := make([]int32, len(raw)/4)
	if err := binary.Read(bytes.NewReader(raw), binary.LittleEndian, values); err != nil {
		t.Fatal(err)
	}
	var tokens [][][]int32
	for token := range slices.Chunk(values, layers*topK) {
		tokens = append(tokens, slices.Collect(slices.Chunk(token, topK)))
	}
	return tokens
}

// metric reads a sample of /metrics by its full name with labels.
func (e *running) metric(t *testing.T, name string) float64 {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(e.get(t, "/metrics").body))
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			var number float64
			if _, err := fmt.Sscan(value, &number); err != nil {
				t.Fatal(err)
			}
			return number
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// activations returns the number of local or remote activations that the engine counts for a rank in all layers.
func (e *running) activations(t *testing.T, locality string, rank int) float64 {
	t.Helper()
	return activations(t, e.get(t, "/metrics").body, locality, rank)
}

func activations(t *testing.T, metrics []byte, locality string, rank int) float64 {
	t.Helper()
	sum := 0.0
	pattern := fmt.Sprintf(`(?m)^semmoe_engine_activations_total\{layer="\d+",locality="%s",rank="%d"\} (\S+)$`, locality, rank)
	for _, match := range regexp.MustCompile(pattern).FindAllSubmatch(metrics, -1) {
		count, err := strconv.ParseFloat(string(match[1]), 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += count
	}
	return sum
}

// Every activation is counted once. It is local if and only if the map places the expert on the rank of the request.
// The outputs equal those of the trivial map.
func TestRanksRoutesAndAccounting(t *testing.T) {
	const ranks, layers, experts, topK = 4, 4, 32, 4
	// A map with four redundant slots, which differ by layer: 36 slots, nine per rank.
	rows := make([][]int, layers)
	onRank := make([]map[[2]int32]bool, ranks)
	for l := range rows {
		for p := range experts + 4 {
			expert := (p*5 + 7*l) % experts
			rows[l] = append(rows[l], expert)
			if onRank[p/9] == nil {
				onRank[p/9] = map[[2]int32]bool{}
			}
			onRank[p/9][[2]int32{int32(l), int32(expert)}] = true
		}
	}
	text, err := json.Marshal(map[string]any{"physical_to_logical_map": rows})
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, func(o *Options) {
		fourRanks(o)
		o.InitExpertLocation, o.RedundantExperts = string(text), 4
	})
	var want [ranks][2]float64
	for i, g := range golden(t) {
		rank := i % ranks
		body := map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 40, "ignore_eos": true}, "return_routed_experts": true}
		header := []string{}
		switch i % 3 {
		case 0:
			body["routed_dp_rank"] = rank
		case 1:
			body["data_parallel_rank"] = rank
		default:
			body["routed_dp_rank"] = rank // the native route ignores the header
			header = []string{"X-Data-Parallel-Rank", fmt.Sprint((rank + 1) % ranks)}
		}
		var out generated
		e.post(t, "/generate", body, header...).into(t, &out)
		if out.Text != g.GreedyText || *out.MetaInfo.DPRank != rank {
			t.Errorf("%s: rank %d gives %q", g.Name, *out.MetaInfo.DPRank, out.Text)
		}
		tokens := decodeRoutes(t, out.MetaInfo.RoutedExperts, layers, topK)
		if len(tokens) != len(g.PromptIDs)+40-1 {
			t.Fatalf("%s: routes of %d tokens, want %d", g.Name, len(tokens), len(g.PromptIDs)+39)
		}
		for position, byLayer := range tokens {
			for l, chosen := range byLayer {
				if position < len(g.PromptIDs) && !slices.Equal(chosen, g.Experts[l][position]) {
					t.Fatalf("%s: position %d, layer %d: experts %v, want %v", g.Name, position, l, chosen, g.Experts[l][position])
				}
				for _, expert := range chosen {
					if onRank[rank][[2]int32{int32(l), expert}] {
						want[rank][0]++
					} else {
						want[rank][1]++
					}
				}
			}
		}
		// With a start, the first tokens are missing.
		body["routed_experts_start_len"] = len(g.PromptIDs)
		var rest generated
		body["sampling_params"] = map[string]any{"max_new_tokens": 3, "ignore_eos": true}
		e.post(t, "/generate", body, header...).into(t, &rest)
		if got := decodeRoutes(t, rest.MetaInfo.RoutedExperts, layers, topK); len(got) != 2 || !slices.EqualFunc(got[1], tokens[len(g.PromptIDs)+1], slices.Equal) {
			t.Errorf("%s: routes from %d on: %v", g.Name, len(g.PromptIDs), got)
		}
		for position := range len(g.PromptIDs) + 2 {
			for l, chosen := range tokens[position] {
				for _, expert := range chosen {
					if onRank[rank][[2]int32{int32(l), expert}] {
						want[rank][0]++
					} else {
						want[rank][1]++
					}
				}
			}
		}
	}
	for rank := range ranks {
		for i, locality := range []string{"local", "remote"} {
			if got := e.activations(t, locality, rank); got != want[rank][i] || got == 0 {
				t.Errorf("rank %d: %v %s activations, want %v", rank, got, locality, want[rank][i])
			}
		}
	}
	if got := e.metric(t, `sglang:num_requests_total{model_name="tiny"}`); got != 30 {
		t.Errorf("%v requests counted, want 30", got)
	}
}

// Without attention data parallelism requests have no rank, and tokens are assigned to ranks round-robin.
func TestTensorParallelAttention(t *testing.T) {
	e := start(t, func(o *Options) { o.TPSize, o.EPSize = 4, 4 })
	g := golden(t)[0]
	var out generated
	e.post(t, "/generate", map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 4}}).into(t, &out)
	if out.MetaInfo.DPRank != nil {
		t.Errorf("dp_rank %d", *out.MetaInfo.DPRank)
	}
	tokens := len(g.PromptIDs) + 3
	for rank := range 4 {
		var sum float64
		for _, locality := range []string{"local", "remote"} {
			sum += e.activations(t, locality, rank)
		}
		if want := float64((tokens + 3 - rank) / 4 * 16); sum != want {
			t.Errorf("rank %d: %v activations, want %v", rank, sum, want)
		}
	}
	if got := e.post(t, "/v1/completions", `{"prompt":"a"}`, "X-Data-Parallel-Rank", "1"); got.status != 400 {
		t.Errorf("rank 1 of one: status %d", got.status)
	}
}

func TestRoundRobinWithoutRank(t *testing.T) {
	e := start(t, fourRanks)
	seen := map[int]int{}
	for range 8 {
		var out generated
		e.post(t, "/generate", `{"input_ids":[5],"sampling_params":{"max_new_tokens":1}}`).into(t, &out)
		seen[*out.MetaInfo.DPRank]++
	}
	for rank := range 4 {
		if seen[rank] != 2 {
			t.Errorf("rank %d served %d of 8 requests", rank, seen[rank])
		}
	}
}
