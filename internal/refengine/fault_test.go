package refengine

import (
	"encoding/json"
	"reflect"
	"testing"
)

// expertMap shifts the experts of every layer by as many slots as shift says for it.
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

// A map that is ignored at dispatch changes the outputs, unless it is trivial; one that is not ignored never does.
func TestFaultIgnoreMapAtDispatch(t *testing.T) {
	// outputs are the tokens, and all bits of their log-probabilities.
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
