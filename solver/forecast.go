// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"fmt"
	"strings"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/trace"
)

// Forecast names the model that computes the scores of a plan.
type Forecast string

// Supported forecasts.
const (
	// Table scores a token by its ID only.
	Table Forecast = "table"
	// Prefill scores a token by everything known while a prompt is processed: the token, the tokens before it, the
	// prompt, and the experts of earlier layers (attention TP).
	Prefill Forecast = "prefill"
	// Decode scores a token by everything known during generation: as Prefill, with the routes of earlier positions in
	// place of the whole prompt (attention TP).
	Decode Forecast = "decode"
	// LookAhead scores a token by the output of the layer's gate before attention, corrected by a profile, and by the
	// experts of the previous layer (attention TP). RawLookAhead uses the gate's output only. Both require a trace with
	// a look-ahead.
	LookAhead    Forecast = "lookahead"
	RawLookAhead Forecast = "lookahead-raw"
	// Transition scores a token by its ID and by the ranks of its experts in the two previous layers, as in the papers
	// (attention TP).
	Transition Forecast = "transition"
	// LookBack uses the same inputs as Transition, but weighs whole distributions over ranks, of up to four previous
	// layers (attention TP).
	LookBack Forecast = "lookback"
)

// Forecasts lists the forecasts that a plan can carry.
var Forecasts = []Forecast{Table, Prefill, Decode, Transition, LookBack, LookAhead, RawLookAhead}

// Contextual reports whether a forecast.Model computes the forecast.
func (f Forecast) Contextual() bool { return f == Prefill || f == Decode }

// Trained reports whether the forecast needs trained tables, which only a plan with this forecast contains.
func (f Forecast) Trained() bool { return f.Contextual() || f == LookAhead || f == LookBack }

// ParseForecast returns the forecast with the given name.
func ParseForecast(name string) (Forecast, error) {
	for _, f := range Forecasts {
		if string(f) == name {
			return f, nil
		}
	}
	return "", fmt.Errorf("forecast %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Forecasts), "[]"))
}

// CheckForecast checks that a forecast can be computed from a trace for a number of ranks.
func CheckForecast(f Forecast, ranks int, t *trace.Trace) error {
	switch {
	case f == LookAhead || f == RawLookAhead:
		return forecast.RawLookAhead(&t.Model).Fits(t)
	case f == Transition && ranks > affinity.MaxTransitionRanks:
		return fmt.Errorf("forecast %s supports at most %d ranks, not %d", f, affinity.MaxTransitionRanks, ranks)
	case f == LookBack && ranks > forecast.MaxLookBackRanks:
		return fmt.Errorf("forecast %s supports at most %d ranks, not %d", f, forecast.MaxLookBackRanks, ranks)
	}
	return nil
}
