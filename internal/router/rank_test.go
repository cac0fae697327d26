// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// rankChoices lists all ways in which a client could try to choose rank 3.
var rankChoices = map[string]struct{ header, member string }{
	"nothing":           {},
	"routed_dp_rank":    {member: `"routed_dp_rank":3`},
	"deprecated":        {member: `"data_parallel_rank":3`},
	"prefill":           {member: `"disagg_prefill_dp_rank":3`},
	"twice":             {member: `"routed_dp_rank":0,"routed_dp_rank":3`},
	"escaped":           {member: `"routed\u005fdp\u005frank":3`},
	"header":            {header: "x-data-parallel-rank"},
	"override":          {header: "X-OVERRIDE-routed-dp-rank"},
	"prefill override":  {header: "x-override-disagg-prefill-dp-rank"},
	"header and member": {"X-Data-Parallel-Rank", `"routed_dp_rank":3`},
}

// TestClientsCannotChooseTheRank checks that no client chooses a rank, and that an engine serves each request on the
// rank that the router reports, also on a route where the engine ignores the rank header.
func TestClientsCannotChooseTheRank(t *testing.T) {
	address := startReferenceEngine(t, locality.Trivial)
	adapter := adapterOf(t, "SGLang")
	pool := newPool(discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape, Engine: "SGLang"})
	url, observations := proxyServer(t, pool, ProxyOptions{RankHeader: "X-Other-Engine", RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	requests := 0
	for name, choice := range rankChoices {
		served := map[string]bool{}
		for i := range 6 {
			body := fmt.Sprintf(`{"text":"text %d","sampling_params":{"max_new_tokens":1}}`, i)
			if choice.member != "" {
				body = "{" + choice.member + "," + body[1:]
			}
			request, err := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if choice.header != "" {
				request.Header[choice.header] = []string{"3"}
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(response.Body)
			response.Body.Close()
			var answer struct {
				Meta struct {
					Rank int `json:"dp_rank"`
				} `json:"meta_info"`
			}
			if err != nil || response.StatusCode != http.StatusOK || json.Unmarshal(text, &answer) != nil {
				t.Fatalf("%s: %s, %s, %v", name, response.Status, text, err)
			}
			if want := response.Header.Get(HeaderRank); strconv.Itoa(answer.Meta.Rank) != want {
				t.Errorf("%s: rank %d served, the router reports %s", name, answer.Meta.Rank, want)
			}
			served[response.Header.Get(HeaderRank)] = true
			requests++
		}
		if len(served) < 2 {
			t.Errorf("%s: all requests went to rank %v", name, served)
		}
	}
	eventually(t, "all requests are observed", func() bool { return len(observations.recent()) == requests })
}

// TestDropsRanksOfClientsOnEveryRoute checks that an engine gets neither a header nor a member of a client that names a
// rank, on any route.
func TestDropsRanksOfClientsOnEveryRoute(t *testing.T) {
	for _, engineType := range []string{"SGLang", "VLLM", "VLLMAscend", "TensorRTLLM"} {
		for _, path := range inferenceRoutes() {
			for name, choice := range rankChoices {
				if lacking[path][engineType] {
					continue
				}
				got := make(chan string, 1)
				backend := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) {
					body, err := io.ReadAll(r.Body)
					if err != nil {
						t.Error(err)
					}
					got <- fmt.Sprintf("%v %s", r.Header, body)
				})
				backend.Engine = engineType
				adapter := adapterOf(t, engineType)
				pool := newPool(discovery.Pinnable([]discovery.Backend{backend}, &adapter)...)
				url, _ := proxyServer(t, pool, ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
				body := `{"prompt":"x"}`
				if choice.member != "" {
					body = `{"prompt":"x",` + choice.member + `}`
				}
				request, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				request.Header.Set(HeaderRequestID, "r")
				if choice.header != "" {
					request.Header[choice.header] = []string{"171717"}
				}
				response, err := http.DefaultClient.Do(request)
				if err != nil {
					t.Fatal(err)
				}
				response.Body.Close()
				if response.StatusCode != http.StatusOK {
					t.Fatalf("%s %s, %s: %s", engineType, path, name, response.Status)
				}
				sent := strings.ToLower(<-got)
				want := 0
				if response.Header.Get(HeaderRank) != "" {
					if adapter.CanPinRank() {
						want++
					}
					if adapter.RankRoutes.FieldOn(path) != "" {
						want++
					}
				}
				if names := strings.Count(sent, "rank"); names != want || strings.Contains(sent, "171717") {
					t.Errorf("%s %s, %s: the engine gets %s", engineType, path, name, sent)
				}
			}
		}
	}
}

// TestGatewayClientsCannotChooseTheRank checks the same through a gateway. A body that the gateway does not let change
// must not choose a rank.
func TestGatewayClientsCannotChooseTheRank(t *testing.T) {
	gatewaytest.NoLeaks(t)
	for name, choice := range rankChoices {
		backend := newEngine(t, "a", 4, func(http.ResponseWriter, *http.Request) {})
		backend.Engine = "SGLang"
		gateway, _, _ := newPicker(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 20})
		body := `{"prompt":"x"}`
		if choice.member != "" {
			body = `{"prompt":"x",` + choice.member + `}`
		}
		for _, path := range []string{"/v1/completions", "/generate"} {
			header := map[string]string{}
			if choice.header != "" {
				header[strings.ToLower(choice.header)] = "171717"
			}
			stream := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
			stream.RequestHeaders(http.MethodPost, path, header, false, nil)
			stream.RequestBody([]byte(body), 20, true)
			_, change := stream.Picked()
			sent, _ := stream.Body(-1)
			after := http.Header{}
			for name, value := range header {
				after.Set(name, value)
			}
			change.Apply(after)
			rank := after.Get(rankHeader)
			want := ""
			if path == "/generate" {
				want = `{"routed_dp_rank":` + rank + `,`
			}
			if len(rank) != 1 || strings.Contains(fmt.Sprint(after), "171717") || want == "" && bytes.Contains(sent, []byte("dp_rank")) ||
				!bytes.HasPrefix(sent, []byte(want)) || bytes.Count(sent, []byte("rank")) != strings.Count(want, "rank") {
				t.Errorf("%s %s: the engine gets %v %s", name, path, after, sent)
			}
		}
	}
}

// TestRejectsUnreadableBodiesThatMayChooseARank checks that a body that the router cannot parse, but an engine may, is
// rejected if it could choose a rank.
func TestRejectsUnreadableBodiesThatMayChooseARank(t *testing.T) {
	backend := newEngine(t, "a", 4, func(http.ResponseWriter, *http.Request) {})
	backend.Engine = "SGLang"
	url, _ := proxyServer(t, newPool(backend), ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	for name, tc := range map[string]struct {
		body, header string
		want         int
	}{
		"NaN and a rank":     {`{"temperature":NaN,"routed_dp_rank":1}`, "", 400},
		"NaN":                {`{"temperature":NaN}`, "", 200},
		"UTF-16":             {"{\x00\"\x00d\x00p\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00", "", 400},
		"compressed":         {"\x1f\x8b", "Content-Encoding", 415},
		"SGLang's own":       {"\x28\xb5", "X-Body-Compressed", 415},
		"prompt about ranks": {`{"prompt":"what is routed_dp_rank?"}`, "", 200},
	} {
		request, err := http.NewRequest(http.MethodPost, url+"/generate", strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		if tc.header != "" {
			request.Header.Set(tc.header, "zstd")
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != tc.want {
			t.Errorf("%s: %s, want %d", name, response.Status, tc.want)
		}
		// If the router cannot add the rank to the body, no rank is reported.
		if unread := tc.body == `{"temperature":NaN}`; tc.want == 200 && (response.Header.Get(HeaderRank) == "") != unread {
			t.Errorf("%s: rank %s", name, response.Header.Get(HeaderRank))
		}
	}
}

// TestCountsNoAnswerOfAnotherRank checks that a sampled response of another rank is not counted for the chosen rank.
func TestCountsNoAnswerOfAnotherRank(t *testing.T) {
	backend := newEngine(t, "a", 4, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"meta_info":{"prompt_tokens":1,"completion_tokens":1,"dp_rank":9,"routed_experts":"AAAA"}}`)
	})
	backend.Engine, backend.Shape = "SGLang", &planstest.Shape
	url, observations := proxyServer(t, newPool(backend), ProxyOptions{RoutedExperts: adapterOf(t, "SGLang").RoutedExperts, SamplePercent: 100, MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
	fetch(t, url+"/generate", `{"text":"x"}`)
	eventually(t, "the sample fails", func() bool { return testutil.ToFloat64(observations.failures) == 1 })
	if len(observations.recent()) != 0 {
		t.Errorf("%d observations", len(observations.recent()))
	}
}
