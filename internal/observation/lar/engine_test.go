// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"strings"
	"testing"
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
