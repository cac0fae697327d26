// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"strings"
	"testing"
)

// TestChooseForecast checks that the smallest tables within the tolerance of the best time are chosen.
func TestChooseForecast(t *testing.T) {
	table := func(us float64) ForecastCandidate {
		return ForecastCandidate{Forecast: Table, TableBytes: 10, LayerUS: us}
	}
	back := func(us, work float64) ForecastCandidate {
		return ForecastCandidate{Forecast: LookBack, TableBytes: 30, LayerUS: us, AssignmentUS: work}
	}
	transition := func(us float64) ForecastCandidate {
		return ForecastCandidate{Forecast: Transition, TableBytes: 11, LayerUS: us}
	}
	for name, test := range map[string]struct {
		candidates []ForecastCandidate
		want       Forecast
	}{
		"only the table":                  {[]ForecastCandidate{table(100)}, Table},
		"a gain within the tolerance":     {[]ForecastCandidate{back(99.1, 0), table(100)}, Table},
		"a gain above the tolerance":      {[]ForecastCandidate{table(100), back(98.9, 0)}, LookBack},
		"the smaller of two":              {[]ForecastCandidate{table(100), back(90, 0), transition(90.8)}, Transition},
		"the faster of two":               {[]ForecastCandidate{table(100), back(90, 0), transition(91)}, LookBack},
		"a gain below the time to assign": {[]ForecastCandidate{table(100), back(90, 150)}, Table},
		"a gain above the time to assign": {[]ForecastCandidate{table(2000), back(1800, 150)}, LookBack},
		"slower":                          {[]ForecastCandidate{transition(101), table(100), back(102, 0)}, Table},
		"of the same size, the faster":    {[]ForecastCandidate{table(100), {Forecast: Transition, TableBytes: 10, LayerUS: 99.5}}, Transition},
	} {
		choice := ForecastChoice{Candidates: test.candidates}
		if choice.choose(); choice.Chosen != test.want {
			t.Errorf("%s: %s, want %s", name, choice.Chosen, test.want)
		}
	}
	choice := ForecastChoice{Candidates: []ForecastCandidate{table(2000), back(1800, 150)}, Skipped: []string{"lookahead (no input)"}}
	choice.choose()
	if got, want := choice.Text(), "forecast lookback, by modelled layer time, time of assignment and table size: table 2000.0 µs (0.0 MiB), lookback 1800.0 + 150 µs (0.0 MiB); not compared: lookahead (no input)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := (&ForecastChoice{Chosen: Table, Reason: "one document"}).Text(); !strings.HasSuffix(got, "table: one document") {
		t.Errorf("%q", got)
	}
}
