// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/discovery"
)

// rankNames are the suffixes of names from which engines read a rank. rankContainers are the members in which they read
// options.
var (
	rankNames      = []string{"dp_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "override_routed_dp_rank", "x_data_parallel_rank", "x_override_routed_dp_rank"}
	rankContainers = []string{"", "sampling_params", "extra_body", "extra_args", "vllm_xargs", "kv_transfer_params", "nvext", "requests"}
)

// spelled returns a name in a random spelling: case, - or _, and, for members, escapes.
func spelled(random *rand.Rand, name string, member bool) string {
	var text strings.Builder
	for _, c := range name {
		switch {
		case c == '_' && random.IntN(2) == 0:
			text.WriteByte('-')
		case member && random.IntN(4) == 0:
			fmt.Fprintf(&text, `\u%04x`, c)
		case random.IntN(2) == 0:
			text.WriteString(strings.ToUpper(string(c)))
		default:
			text.WriteRune(c)
		}
	}
	return text.String()
}

// TestNoSpellingChoosesARank checks that no spelling of a header or member, on any route, lets a client choose a rank:
// the engine gets only the router's.
func TestNoSpellingChoosesARank(t *testing.T) {
	const chosen = 717171
	random := rand.New(rand.NewPCG(5, 5))
	var mu sync.Mutex
	var got string
	backend := newEngine(t, "a", 4, func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		got = fmt.Sprintf("%v %s", r.Header, body)
	})
	for _, engineType := range []string{"SGLang", "VLLM", "VLLMAscend", "TensorRTLLM"} {
		backend.Engine = engineType
		adapter := adapterOf(t, engineType)
		url, _ := proxyServer(t, newPool(discovery.Pinnable([]discovery.Backend{backend}, &adapter)...), ProxyOptions{MaxBodyBytes: 1 << 20, EndpointWait: time.Second})
		paths := slices.DeleteFunc(allRoutes(), func(path string) bool { return lacking[path][engineType] })
		for range 300 {
			path, name := paths[random.IntN(len(paths))], rankNames[random.IntN(len(rankNames))]
			body, header := `{"prompt":"x"}`, ""
			if random.IntN(2) == 0 {
				header = spelled(random, name, false)
			} else {
				member := fmt.Sprintf(`"%s":%d`, spelled(random, name, true), chosen)
				if container := rankContainers[random.IntN(len(rankContainers))]; container != "" {
					member = fmt.Sprintf(`%q:{"a":1,%s}`, container, member)
				}
				body = `{"prompt":"x",` + member + `}`
			}
			request, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if header != "" {
				request.Header[header] = []string{fmt.Sprint(chosen)}
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			mu.Lock()
			if response.StatusCode != http.StatusOK || strings.Contains(got, fmt.Sprint(chosen)) {
				t.Errorf("%s %s, header %q, body %s: %s, the engine gets %s", engineType, path, header, body, response.Status, got)
			}
			mu.Unlock()
		}
	}
}
