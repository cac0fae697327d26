// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
)

// rankHeader is the request header that selects a rank of the reference engine.
const rankHeader = "X-Data-Parallel-Rank"

// TestGateway sends requests through a Gateway that gets a rank for each request from the endpoint picker. Requests are
// spread over the ranks, and the status reports what the picker observes.
func TestGateway(t *testing.T) {
	t.Parallel()
	installInferencePools(t)
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) {
		m.Spec.Routing.Mode = semmoev1.RoutingModeEndpointPicker
		m.Spec.Routing.SamplePercent = ptr.To[int32](100)
	})
	create(t, moed)
	waitComplete(t, moed)

	gateway, ranks := newGateway(t, moed), map[int]int{}
	for i := range 40 {
		ranks[gateway.complete(t, fmt.Sprintf("func number%d() {", i))]++
	}
	if len(ranks) != 4 {
		t.Errorf("requests per rank are %v, want four ranks", ranks)
	}
	touchPods(t, moed, time.Second) // the operator polls the routers only once a minute
	eventually(t, waitTimeout, "the status reports the picker's observations", func() error {
		status := get(t, moed).Status
		if status.LAR == nil || status.LAR.ObservedMilli == nil || status.Routing == nil || len(status.Routing.Ranks) != 4 {
			return fmt.Errorf("lar %+v, routing %+v", status.LAR, status.Routing)
		}
		return nil
	})
}

// gateway simulates a Gateway: it queries the endpoint picker, sends the request to the selected engine pod, and passes
// the response through the picker.
type gateway struct {
	picker *grpc.ClientConn
	engine *http.Client
}

func newGateway(t *testing.T, moed *semmoev1.MoEDeployment) gateway {
	t.Helper()
	address, err := cluster.Forward(t.Context(), moed.Namespace, moed.Name+"-router", semmoev1.PickerPort)
	if err != nil {
		t.Fatal(err)
	}
	return gateway{gatewaytest.Dial(t, address), podClient(t)}
}

// complete sends a small completion request and returns its rank. It fails the test unless the client gets a whole
// completion without the routed experts, which only the picker requested.
func (g gateway) complete(t *testing.T, prompt string) int {
	t.Helper()
	stream := gatewaytest.Open(t, g.picker, gatewaytest.FullDuplex)
	stream.RequestHeaders(http.MethodPost, "/v1/completions", map[string]string{"content-type": "application/json"}, false, nil)
	stream.RequestBody([]byte(fmt.Sprintf(`{"model": "tiny", "prompt": %q, "max_tokens": 4, "temperature": 0}`, prompt)), 20, true)
	endpoints, change := stream.Picked()
	body, _ := stream.Body(-1)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+endpoints[0]+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	change.Apply(request.Header)
	rank, err := strconv.Atoi(request.Header.Get(rankHeader))
	if err != nil {
		t.Fatalf("the picker returns no rank: %v", err)
	}
	response, err := g.engine.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(response.Body)
	if err := response.Body.Close(); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	stream.ResponseHeaders(response.StatusCode, map[string]string{"content-type": response.Header.Get("Content-Type")}, false, endpoints[0])
	stream.ResponseBody(answer, 1000, true)
	stream.Answered() // only now: the picker changes the length of a sampled answer
	shown, _ := stream.Body(-1)
	if err := stream.End(); err != io.EOF {
		t.Fatalf("the picker ended the stream with %v, want io.EOF", err)
	}
	if err := answered(&http.Response{StatusCode: response.StatusCode, Body: io.NopCloser(bytes.NewReader(shown))}, nil); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(shown), "routed_experts") {
		t.Errorf("the client gets the routed experts that only the picker requested: %s", shown)
	}
	return rank
}
