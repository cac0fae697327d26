// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// AutoForecast is not a forecast of a plan: Solve compares forecasts on held-out documents of the profile, and chooses
// one of them (see ForecastChoice).
const AutoForecast Forecast = "auto"

// choosableForecasts are the forecasts that AutoForecast compares. All of them have a consumer in an engine.
var choosableForecasts = []Forecast{Table, Transition, LookBack, LookAhead}

const (
	// forecastTolerance is the relative excess over the minimum time up to which smaller tables are preferred.
	forecastTolerance = 0.01
	// layerwiseMicroseconds is the minimum time that a layer loses if its tokens are assigned to ranks only when the
	// experts of the layer before are known, instead of all layers together before the first one: 163 µs at least were
	// measured for a layer on its own, and 10 to 20 µs for one of 48 (docs/benchmarks/gpu-kernels.md).
	layerwiseMicroseconds = 150
)

// ForecastChoice is the comparison of forecasts for one placement on held-out documents of the train requests.
type ForecastChoice struct {
	// Chosen is the forecast of the plan.
	Chosen Forecast `json:"chosen"`
	// Candidates are the compared forecasts by ascending table size. It is empty if no comparison was possible, and
	// Reason states why.
	Candidates []ForecastCandidate `json:"candidates,omitempty"`
	Reason     string              `json:"reason,omitempty"`
	// Skipped lists the forecasts that were not compared, each with the reason.
	Skipped []string `json:"skipped,omitempty"`
}

// ForecastCandidate is a forecast with its score.
type ForecastCandidate struct {
	Forecast Forecast `json:"forecast"`
	// TableBytes is the size of the tables that the forecast reads.
	TableBytes int64 `json:"table_bytes"`
	// LAR is the local activation rate. LayerUS is the modelled time of a layer in microseconds. AssignmentUS is the
	// minimum time of a layer for assigning its tokens, in excess of the forecast Table. All are means over the batch
	// sizes.
	LAR          float64 `json:"lar"`
	LayerUS      float64 `json:"layer_us"`
	AssignmentUS float64 `json:"assignment_us"`
}

// total returns the time by which forecasts are compared.
func (c *ForecastCandidate) total() float64 { return c.LayerUS + c.AssignmentUS }

// choose chooses the smallest tables whose time exceeds the minimum by at most forecastTolerance. Among tables of the
// same size, it chooses the faster ones.
func (f *ForecastChoice) choose() {
	slices.SortStableFunc(f.Candidates, func(a, b ForecastCandidate) int {
		return cmp.Or(cmp.Compare(a.TableBytes, b.TableBytes), cmp.Compare(a.total(), b.total()))
	})
	fastest := slices.MinFunc(f.Candidates, func(a, b ForecastCandidate) int { return cmp.Compare(a.total(), b.total()) })
	for _, c := range f.Candidates {
		if c.total() <= fastest.total()*(1+forecastTolerance) {
			f.Chosen = c.Forecast
			return
		}
	}
}

// Text returns one clause with the result.
func (f *ForecastChoice) Text() string {
	text := fmt.Sprintf("forecast %s", f.Chosen)
	if len(f.Candidates) == 0 {
		text += ": " + f.Reason
	} else {
		var all []string
		for _, c := range f.Candidates {
			time := fmt.Sprintf("%.1f", c.LayerUS)
			if c.AssignmentUS > 0 {
				time += fmt.Sprintf(" + %.0f", c.AssignmentUS)
			}
			all = append(all, fmt.Sprintf("%s %s µs (%s)", c.Forecast, time, BytesText(c.TableBytes)))
		}
		text += ", by modelled layer time, time of assignment and table size: " + strings.Join(all, ", ")
	}
	if len(f.Skipped) > 0 {
		text += "; not compared: " + strings.Join(f.Skipped, ", ")
	}
	return text
}

// tableBytes returns the size of the tables that the plan's forecast reads.
func (p *Plan) tableBytes() int64 {
	size := func(elements, bytes int) int64 { return int64(elements) * int64(bytes) }
	if p.Forecast == LookAhead {
		m := p.LookAhead
		return size(len(m.Slope)+len(m.Bias)+len(m.Gate)+len(m.Earlier), 4)
	}
	tables := size(len(p.Tokens.Rank)+len(p.Tokens.Score), 2)
	switch p.Forecast {
	case Transition:
		tables += size(len(p.Transitions.Rank)+len(p.Transitions.Confidence), 2)
	case LookBack:
		tables += size(len(p.LookBack.Factor), 4)
	}
	return tables
}

// compareForecasts compares forecasts for a placement, and chooses one. The documents that score a forecast are not
// those of its tables.
func (s *search) compareForecasts(ctx context.Context, p *placement.Placement, by placement.Algorithm, deadline time.Time) (*ForecastChoice, error) {
	choice := &ForecastChoice{Chosen: Table}
	switch {
	case !s.options.messages().None():
		choice.Reason = fmt.Sprintf("times are not modelled for objective %s", s.options.objective())
		return choice, nil
	case s.trace.Model.HiddenSize == 0:
		choice.Reason = "times are not modelled, because the profile lacks the sizes of the model"
		return choice, nil
	}
	part := &search{trace: s.trace.Subset(s.train), options: s.options, groups: s.groups, unused: s.unused}
	part.options.Embeddings, part.options.Progress = nil, nil
	var err error
	if part.train, part.test, err = trace.Split(part.trace, validationPercent, s.options.Seed); err != nil {
		choice.Reason = "the profile has only one document, so no forecast can be validated"
		return choice, nil
	}
	var forecasts []Forecast
	for _, f := range choosableForecasts {
		o := s.options
		o.Forecast = f
		if err := errors.Join(CheckForecast(f, o.Ranks, s.trace), o.checkTable(&s.trace.Model)); err != nil {
			choice.Skipped = append(choice.Skipped, fmt.Sprintf("%s (%v)", f, err))
			continue
		}
		forecasts = append(forecasts, f)
	}
	if part.tokens, err = affinity.CountTokens(ctx, part.trace, part.train); err != nil {
		return nil, err
	}
	progress := s.progress("Forecasts")
	for i, f := range forecasts {
		if f != Table && !deadline.IsZero() && time.Now().After(deadline) {
			choice.Skipped = append(choice.Skipped, fmt.Sprintf("%s (the time budget is exhausted)", f))
			continue
		}
		part.options.Forecast = f
		plan, err := part.plan(ctx, p, by)
		if err != nil {
			return nil, err
		}
		score, err := part.modelledTimes(ctx, plan)
		if err != nil {
			return nil, err
		}
		c := ForecastCandidate{Forecast: f, TableBytes: plan.tableBytes(), LAR: score.lar, LayerUS: score.mean}
		if f != Table {
			c.AssignmentUS = layerwiseMicroseconds
		}
		choice.Candidates = append(choice.Candidates, c)
		part.unused = plan.Tokens
		if progress != nil {
			progress(i+1, len(forecasts))
		}
	}
	s.unused = part.unused
	choice.choose()
	return choice, nil
}
