// SPDX-License-Identifier: Apache-2.0

package router

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
)

// TestReportSize checks that a report stays small over time, with three revisions of 16 ranks for more than an hour.
func TestReportSize(t *testing.T) {
	o := newObservations(prometheus.NewRegistry(), ProxyOptions{SamplePercent: 100}, NewPool())
	clock := &testClock{}
	o.now = clock.now
	random := rand.New(rand.NewPCG(1, 1))
	for i := range 2 * 3600 {
		clock.pass(0.75 * 2 * random.Float64())
		revision := []string{"name-0123456789", "name-abcdefghij", "name-9876543210"}[i%3]
		one := lar.Service{Requests: 1}
		x := lar.Covariates{float64(random.IntN(8000)), float64(random.IntN(800)), float64(random.IntN(80))}
		one.FirstToken.AddWith(random.Float64(), x)
		one.InterToken.AddWith(random.Float64(), x)
		o.served(revision, one)
		count := lar.Count{Tokens: 1000, TokenLayers: 58_000, RemoteRanks: int64(random.IntN(400_000)), SavedBytes: 1e9 * random.Float64()}
		for range 4 {
			group := lar.Activations{Local: int64(random.IntN(60_000)), Total: 116_000}
			count.LayerGroups = append(count.LayerGroups, group)
			count.Local += group.Local
			count.Total += group.Total
		}
		o.add(lar.Observation{Revision: revision, Plan: strings.Repeat("ab12", 16), Rank: i % 16, Count: count, Forecast: &lar.Forecast{
			Tables: strings.Repeat("cd34", 16), Best: i % 16, Highest: share(random.Float64()), Predicted: share(random.Float64()), Known: share(random.Float64()), Pairs: share(random.Float64()),
		}})
	}
	var reports [2]lar.Report
	var size [2]int
	for i, encoding := range []string{"", "gzip"} {
		request := httptest.NewRequest(http.MethodGet, "/v1/observations", nil)
		request.Header.Set("Accept-Encoding", encoding)
		recorder := httptest.NewRecorder()
		o.ServeHTTP(recorder, request)
		if got := recorder.Header().Get("Content-Encoding"); got != encoding {
			t.Fatalf("encoding %q, want %q", got, encoding)
		}
		size[i] = recorder.Body.Len()
		body := io.Reader(recorder.Body)
		if encoding == "gzip" {
			var err error
			if body, err = gzip.NewReader(body); err != nil {
				t.Fatal(err)
			}
		}
		if err := json.NewDecoder(body).Decode(&reports[i]); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d bytes, %d compressed", size[0], size[1])
	if size[0] > 900<<10 || size[1] > 200<<10 {
		t.Errorf("%d bytes, or %d compressed, are too many", size[0], size[1])
	}
	if err := reports[0].Validate(); err != nil || len(reports[0].Observations) != ringSize || len(reports[0].Service) != lar.ServiceBuckets {
		t.Errorf("%d observations, %d minutes, error %v", len(reports[0].Observations), len(reports[0].Service), err)
	}
	if diff := cmp.Diff(reports[0], reports[1]); diff != "" {
		t.Errorf("compressed (-want +got):\n%s", diff)
	}
}
