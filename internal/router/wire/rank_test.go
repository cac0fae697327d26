// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/jsonscan"
)

// TestDropRank checks that every member that chooses a rank is removed, and that all other bytes stay in place.
func TestDropRank(t *testing.T) {
	for body, want := range map[string]string{
		`{"routed_dp_rank":3}`:                                             `{}`,
		`{"routed_dp_rank":3,"prompt":"x"}`:                                `{"prompt":"x"}`,
		`{"prompt":"x" , "data_parallel_rank":"3"}`:                        `{"prompt":"x"}`,
		`{"a":1,"disagg_prefill_dp_rank":[1,2],"b":2}`:                     `{"a":1,"b":2}`,
		`{"routed_dp_rank":0,"a":1,"routed_dp_rank":1,"routed_dp_rank":2}`: `{"a":1}`,
		`{"routed\u005fdp\u005frank":3,"a":1}`:                             `{"a":1}`,
		`{"\u0072outed_dp_rank":3,"Data_Parallel_Rank":1}`:                 `{}`,
		`{"vllm_xargs":{"data_parallel_rank":1,"x":2},"a":1}`:              `{"vllm_xargs":{"x":2},"a":1}`,
		`{"sampling_params":[{"routed_dp_rank":1},{"n":1}]}`:               `{"sampling_params":[{},{"n":1}]}`,
		`{"extra_body":{"extra_args":{"dp_rank":1}}}`:                      `{"extra_body":{"extra_args":{}}}`,
		` [{"routed_dp_rank":1,"text":"a"},{"text":"b"}]`:                  `[{"text":"a"},{"text":"b"}]`,
		`{"tools":[{"parameters":{"properties":{"dp_rank":{}}}}]}`:         `{"tools":[{"parameters":{"properties":{"dp_rank":{}}}}]}`,
		`{"messages":[{"content":"routed_dp_rank"}],"rank":1}`:             `{"messages":[{"content":"routed_dp_rank"}],"rank":1}`,
	} {
		got := []byte(body)
		b := ParseBody(got)
		has := b.DropRank()
		if len(got) != len(body) || has != (string(got) != body) || choosesRank(got) {
			t.Errorf("%s becomes %s; it chooses a rank: %v before, %v after", body, got, has, choosesRank(got))
		}
		if again := ParseBody(got); !slices.EqualFunc(b.members, again.members, func(x, y jsonscan.Member) bool {
			return string(x.Key) == string(y.Key) && x.Start == y.Start && x.End == y.End
		}) {
			t.Errorf("%s becomes %s with the members %v, want %v", body, got, b.members, again.members)
		}
		var left, wanted any
		if err := json.Unmarshal(got, &left); err != nil {
			t.Fatalf("%s becomes %s: %v", body, got, err)
		}
		if err := json.Unmarshal([]byte(want), &wanted); err != nil || !reflect.DeepEqual(left, wanted) {
			t.Errorf("%s becomes %s, want %s (%v)", body, got, want, err)
		}
	}
}

// choosesRank reports whether a body has a member that DropRank overwrites.
func choosesRank(body []byte) bool {
	b := ParseBody(bytes.Clone(body))
	return b.DropRank()
}

func FuzzDropRank(f *testing.F) {
	f.Add(`{"a":1,"routed_dp_rank":3,"sampling_params":{"dp_rank":1}}`)
	f.Add(`[{"data_parallel_rank":3},{}]`)
	f.Fuzz(func(t *testing.T, body string) {
		got := []byte(body)
		b := ParseBody(got)
		b.DropRank()
		if ParseBody([]byte(body)).IsJSON() != ParseBody(got).IsJSON() || choosesRank(got) {
			t.Errorf("%q becomes %q", body, got)
		}
	})
}

// FuzzRankNames checks that header names and member names are matched alike: case and the choice between - and _ do not
// matter.
func FuzzRankNames(f *testing.F) {
	for _, name := range []string{"X-Data-Parallel-Rank", "x-override-routed-dp-rank", "dp_rank", "disagg_prefill_dp_rank", "rank", "model", "DP-RANK\u212a"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if !utf8.ValidString(name) {
			return
		}
		named := engine.NamesRank(name)
		for _, same := range []string{http.CanonicalHeaderKey(name), strings.ReplaceAll(name, "_", "-"), "x-" + name} {
			if named && !engine.NamesRank(same) {
				t.Errorf("%q names a rank, %q does not", name, same)
			}
		}
		body, err := json.Marshal(map[string]int{name: 3})
		if err != nil {
			t.Fatal(err)
		}
		if choosesRank(body) != named {
			t.Errorf("%q names a rank: %t; in a body: %t", name, named, !named)
		}
	})
}

// TestMayChooseRank checks that data that an engine may parse and the router cannot is searched for the names, in each
// encoding and with escapes.
func TestMayChooseRank(t *testing.T) {
	wide := func(text string) []byte {
		var out []byte
		for _, unit := range utf16.Encode([]rune(text)) {
			out = binary.LittleEndian.AppendUint16(out, unit)
		}
		return out
	}
	for body, want := range map[string]bool{
		`{"temperature":NaN,"routed_dp_rank":3}`:                        true,
		`{"temperature":NaN,"routed\u005Fdp_ran\u006b":3}`:              true,
		`{"temperature":NaN,"\u0064ata_parallel_rank":3}`:               true,
		string(wide(`{"routed_dp_rank":3}`)):                            true,
		string(wide(`{"data\u005fparallel_rank":3}`)):                   true,
		"\xef\xbb\xbf" + `{"disagg_prefill_dp_rank":3}`:                 true,
		strings.Repeat("x", 1<<16) + "dp_rank" + strings.Repeat("x", 9): true,
		`routed%5fdp%5Frank=3`:                                          true,
		`form-data; name="data_\parallel_rank"`:                         true,
		`form-data; name*=utf-8''data%5Fparallel%5Frank`:                true,
		`form-data;name*0=data_par;name*1=allel_rank`:                   true,
		`form-data; name="file"; filename*=utf-8''a%20rank`:             false,
		`{"temperature":NaN,"rank":3,"\u00":1,"dp":1}`:                  false,
		``: false,
	} {
		if got := MayChooseRank([]byte(body)); got != want {
			t.Errorf("%.80q: %v, want %v", body, got, want)
		}
	}
}

func TestWith(t *testing.T) {
	for body, want := range map[string]string{
		` {"prompt":"x"}`: `{"r":3,"prompt":"x"}`, `{ }`: `{"r":3 }`, `[{}]`: "", `{`: "", ``: "",
	} {
		head, rest := ParseBody([]byte(body)).With(Addition{"r", "3"})
		if want == "" {
			want = body
		}
		if got := head + string(rest); got != want {
			t.Errorf("%s becomes %s; want %s", body, got, want)
		}
	}
}

// TestCompressed checks that each line of both headers is read.
func TestCompressed(t *testing.T) {
	for _, tc := range []struct {
		name   string
		values []string
		want   bool
	}{
		{"Content-Encoding", nil, false}, {"Content-Encoding", []string{""}, false}, {"Content-Encoding", []string{"Identity"}, false},
		{"Content-Encoding", []string{"gzip"}, true}, {"Content-Encoding", []string{"identity, gzip"}, true},
		{"Content-Encoding", []string{"", "zstd"}, true}, {"Content-Encoding", []string{"identity", "br"}, true},
		{"X-Body-Compressed", []string{""}, false}, {"X-Body-Compressed", []string{"", "1"}, true},
	} {
		if got := Compressed(http.Header{tc.name: tc.values}); got != tc.want {
			t.Errorf("%s %q: %v, want %v", tc.name, tc.values, got, tc.want)
		}
	}
}
