// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/plans/planstest"
)

// TestReportsTheLoadOfExperts checks that the most and the least used experts in the router's report match the
// responses of the engine.
func TestReportsTheLoadOfExperts(t *testing.T) {
	address := startReferenceEngine(t, locality.Trivial)
	adapter := adapterOf(t, "SGLang")
	pool := newPool(discovery.Backend{Pod: "p", Address: address, Ranks: 4, Revision: "r", Shape: &planstest.Shape, Engine: "SGLang"})
	registry := prometheus.NewRegistry()
	url, observed := proxyServerOn(t, registry, pool, ProxyOptions{
		RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, ExpertLoadSeries: 2, MaxBodyBytes: 1 << 20, EndpointWait: time.Second,
	})
	shape := planstest.Shape
	want := expertload.NewCounts(shape)
	at, err := lar.Contiguous(shape, 4, 0)
	if err != nil {
		t.Fatal(err)
	}
	const requests = 12
	for i := range requests {
		prompt, err := json.Marshal(strings.Repeat(fmt.Sprintf("SELECT name, id FROM users WHERE id = %d; ", i), 12))
		if err != nil {
			t.Fatal(err)
		}
		body := fmt.Sprintf(`{"text":%s,"sampling_params":{"max_new_tokens":4}`, prompt)
		var answer struct {
			Meta struct {
				RoutedExperts string `json:"routed_experts"`
			} `json:"meta_info"`
		}
		if err := json.Unmarshal([]byte(fetch(t, "http://"+address+"/generate", body+`,"return_routed_experts":true}`)), &answer); err != nil {
			t.Fatal(err)
		}
		experts, err := adapter.RoutedExperts.Decode(answer.Meta.RoutedExperts, shape.Layers, shape.ExpertsPerToken)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lar.CountActivations(experts, shape, at, want); err != nil {
			t.Fatal(err)
		}
		fetch(t, url+"/generate", body+"}")
	}
	eventually(t, "all requests are observed", func() bool { return len(observed.recent()) == requests })

	type series struct {
		layer, expert string
		ratio         float64
	}
	var all []series
	for i, layer := range shape.MoELayers {
		counts := want[i*shape.Experts : (i+1)*shape.Experts]
		total := int64(0)
		for _, count := range counts {
			total += count
		}
		for expert, count := range counts {
			all = append(all, series{fmt.Sprint(layer), fmt.Sprint(expert), float64(count) * float64(shape.Experts) / float64(total)})
		}
	}
	slices.SortStableFunc(all, func(a, b series) int { return cmp.Compare(a.ratio, b.ratio) })
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	reported := 0
	for _, family := range families {
		if family.GetName() != "semmoe_extreme_expert_load_ratio" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			reported++
			got := series{labels["layer"], labels["expert"], metric.GetGauge().GetValue()}
			list := all[:2]
			if labels["extreme"] == "highest" {
				list = all[len(all)-2:]
			}
			if !slices.ContainsFunc(list, func(s series) bool {
				return s.layer == got.layer && s.expert == got.expert && s.ratio-got.ratio < 1e-9 && got.ratio-s.ratio < 1e-9
			}) {
				t.Errorf("%s: %+v, want one of %+v", labels["extreme"], got, list)
			}
		}
	}
	if reported != 4 {
		t.Errorf("%d series, want 4", reported)
	}
}
