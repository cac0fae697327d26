// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestEngineActivations(t *testing.T) {
	of := func(pod, revision string, local, total int64) EngineCounts {
		return EngineCounts{Pod: pod, Revision: revision, Activations: Activations{Local: local, Total: total}}
	}
	reports := []Report{
		{Engines: []EngineCounts{of("p", "r", 10, 20), of("q", "r", 1, 2), of("x", "s", 9, 9)}},
		{Engines: []EngineCounts{of("p", "r", 12, 30), of("q", "r", 2, 2)}},
		{},
	}
	if got, want := EngineActivations(reports, "r"), (Activations{Local: 13, Total: 32}); got != want {
		t.Errorf("%v, want %v: each pod once", got, want)
	}
	if got := EngineActivations(reports, "t"); got != (Activations{}) {
		t.Errorf("%v of a revision without pods", got)
	}
}

func TestEnginePoints(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	of := func(bucket int, revision, tables string, local, total int64) EngineBucket {
		return EngineBucket{Start: at.Add(time.Duration(bucket) * EngineBucketTime), Revision: revision, Tables: tables, Activations: Activations{Local: local, Total: total}}
	}
	reports := []Report{
		{EngineBuckets: []EngineBucket{of(1, "r", "a", 6000, 10_000), of(1, "s", "a", 0, 10_000), of(2, "r", "a", 1, 2), of(2, "r", "b", 20_000, 20_000)}},
		{EngineBuckets: []EngineBucket{of(0, "r", "a", 4000, 10_000), of(1, "r", "a", 9000, 12_000)}},
	}
	want := []Point{{at, 0.4}, {at.Add(EngineBucketTime), 0.3}}
	if diff := cmp.Diff(want, EnginePoints(reports, "a")); diff != "" {
		t.Errorf("points (-want +got):\n%s", diff)
	}
	for name, r := range map[string]Report{
		"more local": {EngineBuckets: []EngineBucket{of(0, "r", "a", 2, 1)}}, "negative": {EngineBuckets: []EngineBucket{of(0, "r", "a", -1, 1)}},
		"too many": {EngineBuckets: make([]EngineBucket, maxEngineBuckets+1)}, "a long text": {Engines: []EngineCounts{{Problem: strings.Repeat("x", MaxEngineProblem+1)}}},
	} {
		if r.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestReportRefusesEngines(t *testing.T) {
	for name, tc := range map[string]struct {
		engines []EngineCounts
		want    string
	}{
		"negative":   {[]EngineCounts{{Activations: Activations{Local: -1}}}, "engines[0]"},
		"more local": {[]EngineCounts{{}, {Activations: Activations{Local: 2, Total: 1}}}, "engines[1]"},
		"overflow":   {[]EngineCounts{{Activations: Activations{Total: MaxActivations + 1}}}, "engines[0]"},
		"too many":   {make([]EngineCounts, maxEngines+1), "at most 16384"},
	} {
		if err := (Report{Engines: tc.engines}).Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
	if err := (Report{Engines: []EngineCounts{{Activations: Activations{Local: 1, Total: 1}}}}).Validate(); err != nil {
		t.Error(err)
	}
}
