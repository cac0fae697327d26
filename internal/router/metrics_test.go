// SPDX-License-Identifier: Apache-2.0

package router

import (
	"testing"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/test/metricsdoc"
)

func TestMetricsAreDocumented(t *testing.T) {
	p, _ := solved(t)
	pool := NewPool()
	pool.Set([]discovery.Backend{{Pod: "p", Address: "127.0.0.1:1", Ranks: 4, Revision: "r", PlanDigest: p.Artifact.Digest, Shape: &planstest.Shape}})
	pool.AddLayout(p.layout)
	registry := prometheus.NewRegistry()
	router := newStages(pool, registry, ProxyOptions{SamplePercent: 100, ExpertLoadSeries: 1})
	router.observations.add(lar.Observation{Revision: "r", Count: lar.Count{
		Activations: lar.Activations{Local: 1, Total: 2}, LayerGroups: []lar.Activations{{Local: 1, Total: 2}}, Tokens: 1, TokenLayers: 1,
	}})
	counts := expertload.NewCounts(planstest.Shape)
	for i := range counts {
		counts[i] = 1000
	}
	router.observations.experts.Add("", planstest.Shape, counts)
	router.metrics.tokens.WithLabelValues(rankLabel(0))
	router.metrics.retries.WithLabelValues("unreachable")
	router.metrics.clients.WithLabelValues("team-a")
	router.metrics.limited.WithLabelValues("team-a", clientauth.Rate)
	if _, err := telemetry.New(t.Context(), telemetry.Options{AccessLogPercent: 1}, registry); err != nil {
		t.Fatal(err)
	}
	router.metrics.unscored.WithLabelValues(unscoredPending)
	registry.MustRegister(kvevents.New(1, logr.Discard()).Collectors()...)
	metricsdoc.Check(t, "../../docs/metrics.md", "router", registry)
}
