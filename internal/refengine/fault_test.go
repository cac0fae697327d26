// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"

	"github.com/semmoe/operator/internal/refengine/server"
)

// expertMap shifts the experts of every layer by shift(layer) slots.
func expertMap(t *testing.T, shift func(layer int) int) string {
	t.Helper()
	rows := make([][]int, 4)
	for l := range rows {
		for p := range 32 {
			rows[l] = append(rows[l], (p+shift(l))%32)
		}
	}
	text, err := json.Marshal(map[string]any{"physical_to_logical_map": rows})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A map that is ignored at dispatch changes outputs, unless it is trivial. Without the fault a map never changes
// outputs.
func TestFaultIgnoreMapAtDispatch(t *testing.T) {
	// outputs contains the tokens, and all bits of their log probabilities.
	outputs := func(change func(*Options)) []any {
		e := start(t, func(o *Options) { fourRanks(o); change(o) })
		var all []any
		for _, g := range golden(t)[:3] {
			var c completion
			e.post(t, "/v1/completions", map[string]any{"prompt": g.Text, "max_tokens": 8, "temperature": 0, "logprobs": 2}).into(t, &c)
			all = append(all, c.Choices)
		}
		return all
	}
	want := outputs(func(*Options) {})
	allButOne := func(l int) int { return l % 4 / 3 }
	for name, test := range map[string]struct {
		change func(*Options)
		same   bool
	}{
		"fault, trivial map":              {func(o *Options) { o.Fault = FaultIgnoreMapAtDispatch }, true},
		"fault, trivial map, spare slots": {func(o *Options) { o.Fault, o.RedundantExperts = FaultIgnoreMapAtDispatch, 4 }, true},
		"fault, map that is trivial": {func(o *Options) {
			o.Fault, o.InitExpertLocation = FaultIgnoreMapAtDispatch, expertMap(t, func(int) int { return 0 })
		}, true},
		"fault, map of one layer": {func(o *Options) { o.Fault, o.InitExpertLocation = FaultIgnoreMapAtDispatch, expertMap(t, allButOne) }, false},
		"fault, map of all layers": {func(o *Options) {
			o.Fault, o.InitExpertLocation = FaultIgnoreMapAtDispatch, expertMap(t, func(l int) int { return 8 + l })
		}, false},
		"no fault, map of all layers": {func(o *Options) { o.InitExpertLocation = expertMap(t, func(l int) int { return 8 + l }) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := outputs(test.change); reflect.DeepEqual(got, want) != test.same {
				t.Errorf("the same as without: %v, want %v:\n%+v\n%+v", !test.same, test.same, got, want)
			}
		})
	}
}

// With the fault a route accepts any rank and assigns ranks round-robin. The other routes use the requested rank.
func TestFaultIgnoreRank(t *testing.T) {
	bodies := map[string]string{
		"/v1/completions":      `{"prompt":"a","max_tokens":1,"routed_dp_rank":%d}`,
		"/v1/chat/completions": `{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"routed_dp_rank":%d}`,
		"/generate":            `{"text":"a","sampling_params":{"max_new_tokens":1},"routed_dp_rank":%d}`,
		"/v1/messages":         `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1,"routed_dp_rank":%d}`,
	}
	for _, deaf := range server.RankRoutes {
		e := start(t, func(o *Options) { fourRanks(o); o.Fault = FaultIgnoreRank + deaf })
		for _, route := range server.RankRoutes {
			want := 400
			if route == deaf {
				want = 200
			}
			if got := e.post(t, route, fmt.Sprintf(bodies[route], 4), "X-Data-Parallel-Rank", "4"); got.status != want {
				t.Errorf("ignored on %s, %s: status %d, want %d: %s", deaf, route, got.status, want, got.body)
			}
			served := map[string]bool{}
			for range 4 {
				before := e.get(t, "/metrics").body
				if got := e.post(t, route, fmt.Sprintf(bodies[route], 2), "X-Data-Parallel-Rank", "2"); got.status != 200 {
					t.Fatalf("%s: status %d: %s", route, got.status, got.body)
				}
				after := e.get(t, "/metrics").body
				for rank := range 4 {
					if activations(t, before, "remote", rank) != activations(t, after, "remote", rank) {
						served[fmt.Sprint(rank)] = true
					}
				}
			}
			if obeys := len(served) == 1 && served["2"]; obeys == (route == deaf) {
				t.Errorf("ignored on %s, %s: ranks %v serve", deaf, route, served)
			}
		}
	}
}
