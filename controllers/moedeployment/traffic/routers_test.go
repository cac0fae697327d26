// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/observation/lar"
)

// routerNetwork responds for routers, by address.
type routerNetwork map[string]string

func (n routerNetwork) RoundTrip(request *http.Request) (*http.Response, error) {
	text, known := n[request.URL.Host]
	if !known || request.URL.Path != "/v1/observations" {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(text))}, nil
}

// Reports are summed as if one router had observed everything. Routers that are unreachable, unready, or return invalid
// reports are omitted.
func TestReadRouters(t *testing.T) {
	var want locality.Traffic
	network := routerNetwork{
		"10.0.0.3:9091": `{"last":[{"revision":"r","overall":{"requests":-1}}]}`,
		"10.0.0.4:9091": `{"captureCost":{"asked":{"requests":-1}}}`,
		"10.0.0.5:9091": `{`,
	}
	for router, ip := range []string{"10.0.0.1", "10.0.0.2"} {
		report := lar.Report{Last: lar.Set{}, CaptureCost: &lar.CaptureCost{}}
		for i := range 20 {
			observation := lar.Observation{Revision: []string{"r", "old"}[i%2], Rank: i % 4, Count: lar.Count{Activations: lar.Activations{Local: int64(i + router), Total: 100}}}
			report.Last.Add(observation)
			report.CaptureCost.Plain.Add(1, 10)
			if i%2 == 0 {
				want.Sketch.Add(observation)
			}
		}
		want.Capture.Merge(*report.CaptureCost)
		text, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		network[ip+":9091"] = string(text)
	}
	var pods []*corev1.Pod
	for i := range 8 {
		router := moedtest.Pod(fmt.Sprint("router-", i), "")
		router.Status.PodIP = fmt.Sprint("10.0.0.", i)
		pods = append(pods, router)
	}
	unready := moedtest.Pod("unready", "")
	unready.Status.PodIP, unready.Status.Conditions = "10.0.0.1", nil
	got := locality.TrafficOf(ReadRouters(context.Background(), &http.Client{Transport: network}, append(pods, unready)), "r")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("observed (-want +got):\n%s", diff)
	}
	if got.Enough() || got.RankLoads()[0] != 1000 || got.RankLoads()[1] != 0 || got.RankLoads()[2] != 1000 {
		t.Errorf("20 requests are enough, or the ranks' loads are not %v", got.RankLoads())
	}
	got.Sketch.Merge(want.Sketch)
	if !got.Enough() {
		t.Error("40 requests are not enough")
	}
}

// silentNetwork contains routers that never respond, with some exceptions.
type silentNetwork struct{ answering routerNetwork }

func (n silentNetwork) RoundTrip(request *http.Request) (*http.Response, error) {
	if _, answers := n.answering[request.URL.Host]; answers {
		return n.answering.RoundTrip(request)
	}
	<-request.Context().Done()
	return nil, request.Context().Err()
}

// Many unreachable routers do not use up the time of the reconciliation, and the reports of the others are used, in
// their order.
func TestReadSilentRouters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := silentNetwork{routerNetwork{}}
		var pods []*corev1.Pod
		for i := range 100 {
			router := moedtest.Pod(fmt.Sprint("router-", i), "")
			router.Status.PodIP = fmt.Sprint("10.0.0.", i)
			pods = append(pods, router)
			if i == 3 || i == 30 {
				network.answering[router.Status.PodIP+":9091"] = fmt.Sprintf(`{"last":[{"revision":"%d","overall":{"requests":1,"total":1}}]}`, i)
			}
		}
		begin := time.Now()
		reports := ReadRouters(t.Context(), &http.Client{Transport: network}, pods)
		if took := time.Since(begin); took > totalTimeout {
			t.Errorf("took %v", took)
		}
		if len(reports) != 2 || locality.TrafficOf(reports[:1], "3").Sketch.Overall.Requests != 1 || locality.TrafficOf(reports[1:], "30").Sketch.Overall.Requests != 1 {
			t.Errorf("%d reports, want those of routers 3 and 30", len(reports))
		}
	})
}
