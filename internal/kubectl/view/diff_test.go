// SPDX-License-Identifier: Apache-2.0

package view

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kubectl/terminal"
)

// TestSpecChanges verifies that each spec field is compared and shown under its name in the API.
func TestSpecChanges(t *testing.T) {
	digest := strings.Repeat("ab", 32)
	short := digest[:16]
	for field, test := range map[string]struct {
		change func(*semmoev1.PlacementPlanSpec)
		to     string
	}{
		"solver.forecast":        {func(s *semmoev1.PlacementPlanSpec) { s.Solver.Forecast = semmoev1.ForecastLookBack }, "LookBack"},
		"tokenShuffle":           {func(s *semmoev1.PlacementPlanSpec) { s.TokenShuffle = semmoev1.TokenShuffleDisabled }, "Disabled"},
		"objective":              {func(s *semmoev1.PlacementPlanSpec) { s.Objective = semmoev1.ObjectiveHierarchical }, "Hierarchical"},
		"redundantExperts":       {func(s *semmoev1.PlacementPlanSpec) { s.RedundantExperts = ptr.To(intstr.FromInt32(8)) }, "8"},
		"redundantMemoryBytes":   {func(s *semmoev1.PlacementPlanSpec) { s.RedundantMemoryBytes = ptr.To(resource.MustParse("8Gi")) }, "8Gi"},
		"tokenLoadLimitPercent":  {func(s *semmoev1.PlacementPlanSpec) { s.TokenLoadLimitPercent = ptr.To[int32](110) }, "110"},
		"expertLoadLimitPercent": {func(s *semmoev1.PlacementPlanSpec) { s.ExpertLoadLimitPercent = ptr.To[int32](120) }, "120"},
		"solver.algorithm":       {func(s *semmoev1.PlacementPlanSpec) { s.Solver.Algorithm = "eplb" }, "eplb"},
		"solver.seed":            {func(s *semmoev1.PlacementPlanSpec) { s.Solver.Seed = ptr.To[int64](0) }, "0"},
		"ranksPerNode":           {func(s *semmoev1.PlacementPlanSpec) { s.RanksPerNode = 8 }, "8"},
		"hardware":               {func(s *semmoev1.PlacementPlanSpec) { s.Hardware = &semmoev1.HardwareReference{BuiltIn: "h200-nvlink"} }, "h200-nvlink"},
		"hardwareDigest":         {func(s *semmoev1.PlacementPlanSpec) { s.HardwareDigest = digest }, short},
		"current.planDigest":     {func(s *semmoev1.PlacementPlanSpec) { s.Current = &semmoev1.CurrentPlan{PlanDigest: digest} }, short},
		"current.tablesDigest":   {func(s *semmoev1.PlacementPlanSpec) { s.Current = &semmoev1.CurrentPlan{TablesDigest: digest} }, short},
		"current.targetLARMilli": {func(s *semmoev1.PlacementPlanSpec) { s.Current = &semmoev1.CurrentPlan{TargetLARMilli: 388} }, "388"},
		"minimumGainPercent":     {func(s *semmoev1.PlacementPlanSpec) { s.MinimumGainPercent = ptr.To[int32](0) }, "0"},
		"observedBatchTokens":    {func(s *semmoev1.PlacementPlanSpec) { s.ObservedBatchTokens = []int32{64, 96} }, "64 96"},
		"batchTokens":            {func(s *semmoev1.PlacementPlanSpec) { s.BatchTokens = 512 }, "512"},
	} {
		from, to := &semmoev1.PlacementPlan{}, &semmoev1.PlacementPlan{}
		test.change(&to.Spec)
		if diff := cmp.Diff([]FieldChange{{Field: field, To: test.to}}, specChanges(from, to)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", field, diff)
		}
	}
	own := &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "ours", Key: "h100.json"}}
	if got := hardwareText(own); got != "ConfigMap ours, key h100.json" {
		t.Errorf("hardware %q", got)
	}
}

// TestMissingFigures verifies that a figure is omitted if neither plan has it, and shown as unknown for a plan that
// lacks it.
func TestMissingFigures(t *testing.T) {
	balanced := &semmoev1.PlanForecast{LARMilli: 432, BaselineMilli: 257, WindowImbalanceMilli: 1077}
	messages := &semmoev1.PlanForecast{LARMilli: 250, BaselineMilli: 250, RemoteRanksMilli: 1804, BaselineRemoteRanksMilli: 2300}
	for name, test := range map[string]struct {
		from, to *semmoev1.PlanForecast
		want     []string
	}{
		"shuffled tokens":    {balanced, balanced, []string{"predicted LAR|43.2%|43.2%", "without a plan|25.7%|25.7%", "busiest rank / mean|1.077|1.077"}},
		"no token shuffling": {messages, messages, []string{"predicted LAR|25.0%|25.0%", "without a plan|25.0%|25.0%", "other ranks of a token|1.80 (without a plan 2.30)|1.80 (without a plan 2.30)"}},
		"one of each":        {balanced, messages, []string{"predicted LAR|43.2%|25.0%", "without a plan|25.7%|25.0%", "busiest rank / mean|1.077|unknown", "other ranks of a token|unknown|1.80 (without a plan 2.30)"}},
		"only counts":        {nil, balanced, []string{"predicted LAR|unknown|43.2%", "without a plan|unknown|25.7%", "busiest rank / mean|unknown|1.077"}},
		"both only counts":   {nil, nil, []string{"predicted LAR|unknown|unknown", "without a plan|unknown|unknown"}},
	} {
		var got []string
		for _, row := range (Difference{From: PlanFigures{Forecast: test.from}, To: PlanFigures{Forecast: test.to}}).figureRows()[1:] {
			got = append(got, joined(row))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func joined(row []terminal.Cell) string {
	var texts []string
	for _, cell := range row {
		texts = append(texts, cell.Text)
	}
	return strings.Join(texts, "|")
}
