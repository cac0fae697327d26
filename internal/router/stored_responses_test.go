// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// keeper is an engine that stores responses in its memory, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1, and
// SGLang with --enable-response-store.
type keeper struct {
	name string
	next *atomic.Int32
	mu   sync.Mutex
	// stored are the ids of the stored responses. missed counts the requests for unknown ones. last is the last body.
	stored map[string]bool
	missed map[string]int
	last   string
}

func (k *keeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	k.mu.Lock()
	defer k.mu.Unlock()
	missing := func(id string) {
		k.missed[id]++
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(w, `{"error":{"message":"Response with id '%s' not found.","code":404}}`, id)
	}
	if id, found := strings.CutPrefix(strings.TrimSuffix(r.URL.Path, "/cancel"), "/v1/responses/"); found {
		switch {
		case r.Header.Get("Authorization") != "Bearer key":
			http.Error(w, "unauthorized", http.StatusUnauthorized)
		case !k.stored[id]:
			missing(id)
		default:
			fmt.Fprintf(w, `{"id":%q,"by":%q}`, id, k.name)
		}
		return
	}
	k.last = string(body)
	var request struct {
		Previous string `json:"previous_response_id"`
		Stream   bool   `json:"stream"`
	}
	if err := json.Unmarshal(body, &request); err != nil || request.Previous != "" && !k.stored[request.Previous] {
		missing(request.Previous)
		return
	}
	id := fmt.Sprintf("resp_%d", k.next.Add(1))
	k.stored[id] = true
	if request.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "event: response.created\ndata: {\"response\":{\"id\":%q,\"by\":%q}}\n\n", id, k.name)
		return
	}
	fmt.Fprintf(w, `{"id":%q,"by":%q}`, id, k.name)
}

// TestStoredResponses checks that requests about a stored response, and those that continue one, reach the pod that
// stores it, through the router that has passed it on and through another one, which asks the pods once. Bodies and
// unknown ids are passed on as they are.
func TestStoredResponses(t *testing.T) {
	gatewaytest.NoLeaks(t)
	var next atomic.Int32
	var pods []discovery.Backend
	keepers := map[string]*keeper{}
	for _, name := range []string{"a", "b", "c"} {
		keepers[name] = &keeper{name: name, next: &next, stored: map[string]bool{}, missed: map[string]int{}}
		pods = append(pods, newEngine(t, name, 4, keepers[name].ServeHTTP))
	}
	options := ProxyOptions{RankHeader: rankHeader, MaxBodyBytes: 1 << 10, EndpointWait: time.Second}
	pool := newPool(pods...)
	first, _ := proxyServer(t, pool, options)
	second, _ := proxyServer(t, newPool(pods...), options)
	gateway, _, _ := newPicker(t, newPool(pods...), ProxyOptions{})
	ask := func(method, url, body string) (id, by, text string) {
		t.Helper()
		_, text = sendTo(t, method, url, body, "Authorization", "Bearer key")
		var answer struct{ ID, By string }
		data := text
		if _, after, found := strings.Cut(text, `"response":`); found {
			data = strings.TrimSuffix(strings.TrimSpace(after), "}")
		}
		if err := json.Unmarshal([]byte(data), &answer); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		return answer.ID, answer.By, text
	}
	missed := func(id string) (all int) {
		for _, k := range keepers {
			k.mu.Lock()
			all += k.missed[id]
			k.mu.Unlock()
		}
		return all
	}
	for i := range 8 {
		body := fmt.Sprintf(`{"input":"a","stream":%t}`, i%2 == 1)
		id, by, text := ask(http.MethodPost, first+"/v1/responses", body)
		if keepers[by] == nil || keepers[by].last != body {
			t.Fatalf("%s; the engine gets %s", text, keepers[by].last)
		}
		for n, url := range []string{first, second} {
			for _, request := range []string{"GET /v1/responses/" + id, "POST /v1/responses/" + id + "/cancel", "GET /v1/responses/" + id + "?stream=true"} {
				method, path, _ := strings.Cut(request, " ")
				if got, at, text := ask(method, url+path, ""); got != id || at != by {
					t.Errorf("router %d: %s: %s; it is stored by %s", n, request, text, by)
				}
			}
			continued, at, text := ask(http.MethodPost, url+"/v1/responses", fmt.Sprintf(`{"input":"b","previous_response_id":%q}`, id))
			if at != by || continued == id {
				t.Errorf("router %d: the continuation of %s, which %s stores, is %s", n, id, by, text)
			}
			if asked := missed(id); n == 0 && asked != 0 || asked > len(pods)-1 {
				t.Errorf("router %d: other pods were asked %d times", n, asked)
			}
		}
		stream := gatewaytest.Open(t, gateway, gatewaytest.FullDuplex)
		stream.RequestHeaders(http.MethodGet, "/v1/responses/"+id, map[string]string{"authorization": "Bearer key"}, true, nil)
		endpoints, _ := stream.Picked()
		for _, pod := range pods {
			if pod.Pod == by && (len(endpoints) != 1 || endpoints[0] != pod.Address) {
				t.Errorf("a gateway gets %v for a response of %s", endpoints, pod.Address)
			}
		}
	}
	for _, request := range []string{"GET /v1/responses/resp_none", "GET /v1/responses/" + strings.Repeat("x", 300), "POST /v1/responses"} {
		method, path, _ := strings.Cut(request, " ")
		if _, _, text := ask(method, first+path, `{"previous_response_id":"resp_none"}`); !strings.Contains(text, "not found.") {
			t.Errorf("%s: %s", request, text)
		}
	}
	// A response of a pod that has left is unknown: the client gets the answer of another pod.
	id, by, _ := ask(http.MethodPost, first+"/v1/responses", `{"input":"a"}`)
	var left []discovery.Backend
	for _, pod := range pods {
		if pod.Pod != by {
			left = append(left, pod)
		}
	}
	pool.Set(left)
	if _, _, text := ask(http.MethodGet, first+"/v1/responses/"+id, ""); !strings.Contains(text, "not found.") {
		t.Errorf("of a pod that has left: %s", text)
	}
	if response, _ := sendTo(t, http.MethodGet, second+"/v1/responses/resp_other", ""); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a key: %s", response.Status)
	}
}

// TestKnownResponsesAreBounded checks that responses without end take a bounded amount of memory.
func TestKnownResponsesAreBounded(t *testing.T) {
	s := newStoredResponses(newPool(), nil)
	for i := range maxStoredResponses + 100 {
		response := &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(fmt.Sprintf(`{"id":"resp_%d"}`, i)))}
		s.learn("/v1/responses", response, "a:1")
		if _, err := io.ReadAll(response.Body); err != nil {
			t.Fatal(err)
		}
	}
	if got := len(s.servers.Keys()); got != maxStoredResponses {
		t.Errorf("%d responses are known, want %d", got, maxStoredResponses)
	}
}
