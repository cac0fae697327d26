// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"
	"crypto/sha256"
	"fmt"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
	"github.com/semmoe/operator/solver/trace"
)

// Plan is a placement with its forecast tables.
type Plan struct {
	Attention placement.Attention
	Forecast  Forecast
	Placement *placement.Placement
	// HiddenLayers and Vocabulary are those of the model. The placement contains the other dimensions.
	HiddenLayers, Vocabulary int
	// Shape contains the cost parameters of a token of the model, as far as the trace records them.
	Shape cost.Shape
	// Ranks are the scores of attention data parallelism, Tokens those of tensor parallelism. The other one is nil.
	Ranks  *affinity.RankTable
	Tokens *affinity.TokenTable
	// Transitions are the rank transition tables between layers (attention TP). They are nil if there are too many
	// ranks.
	Transitions *affinity.Transitions
	// Context scores tokens in their context, for the forecasts Prefill and Decode. It also reads the token table.
	Context *forecast.Model
	// LookAhead is the correction of the forecast LookAhead; nil for all others.
	LookAhead *forecast.LookAhead
	// LookBack contains the tables of the forecast LookBack, which it uses together with the token table. It is nil for
	// all others.
	LookBack *forecast.LookBack
	// Seen describes the training data of the tables. It is nil in plans of earlier versions.
	Seen *affinity.Seen
	// Objective and RanksPerNode define what the scores optimize. RanksPerNode is 0 for the objective Activation.
	Objective    placement.Objective
	RanksPerNode int
	// RankCapacity contains the ranks' shares of the tokens; nil means equal shares.
	RankCapacity []float64
	// Algorithm produced the placement: the requested algorithm, or contiguous after a fallback.
	Algorithm placement.Algorithm
	// TrainPercent and Seed reproduce the split by document from which the plan was solved. TraceDigest identifies the
	// trace.
	TrainPercent int
	Seed         uint64
	TraceDigest  [sha256.Size]byte
	// ModelDigest identifies the checkpoint from which the trace was recorded. It is empty if the trace does not record
	// it.
	ModelDigest string
	// Layout is the digest of the plan whose placement this plan reuses with new tables. It is empty if placement and
	// tables were solved together.
	Layout string
	// Drift calibrates the test that detects whether traffic has drifted from the plan's profile. It is nil if there is
	// none (see CalibrateDrift).
	Drift *drift.Calibration
	// Schedule is the schedule inside MoE layers. It is nil if the model's shape is unknown (see ScheduleLayers).
	Schedule *schedule.Schedule
	// Hardware is the profile of the target machines; nil means hardware.DefaultProfile.
	Hardware *hardware.Profile
	// Front contains the candidates of a search by time, and Chosen the name of the selected one. Both are empty for
	// other objectives.
	Front  []FrontPoint
	Chosen string
	// Copies records how the number of redundant slots was chosen. It is nil if the number was given.
	Copies *Copies
}

// Machines returns the profile of the target machines.
func (p *Plan) Machines() *hardware.Profile { return cmp.Or(p.Hardware, hardware.DefaultProfile()) }

// hosts returns, for every layer, the ranks on which each expert is local.
func (p *Plan) hosts() []affinity.Hosts {
	hosts := make([]affinity.Hosts, len(p.Placement.Layers))
	for l := range hosts {
		hosts[l] = p.Placement.Local(l)
	}
	return hosts
}

// matches checks that a trace belongs to the plan's model.
func (p *Plan) matches(t *trace.Trace) error {
	if err := cost.Matches(t, p.Placement); err != nil {
		return err
	}
	if p.Vocabulary != t.Model.Vocabulary {
		return fmt.Errorf("the plan's tables are for a vocabulary of %d, the trace's is %d", p.Vocabulary, t.Model.Vocabulary)
	}
	return nil
}

// TokenForecast returns the plan's forecast for the tokens of a trace, weighted by the plan's objective (attention TP).
func (p *Plan) TokenForecast(t *trace.Trace) (cost.TokenForecast, error) {
	if err := p.matches(t); err != nil {
		return nil, err
	}
	return p.tokenForecast(t)
}

// tokenForecast is TokenForecast for a trace that matches.
func (p *Plan) tokenForecast(t *trace.Trace) (cost.TokenForecast, error) {
	tokens, err := p.bind(t)
	if err != nil {
		return nil, err
	}
	if m := p.messages(); !m.None() {
		tokens = messageForecast{tokens, m, t.Model.TopK}
	}
	return tokens, nil
}

// bind prepares the plan's forecast for the tokens of a trace.
func (p *Plan) bind(t *trace.Trace) (cost.TokenForecast, error) {
	switch p.Forecast {
	case Prefill, Decode:
		return p.Context.Bind(p.Tokens, p.hosts(), t), nil
	case LookAhead:
		return p.LookAhead.Bind(p.hosts(), t), p.LookAhead.Fits(t)
	case RawLookAhead:
		raw := forecast.RawLookAhead(&t.Model)
		return raw.Bind(p.hosts(), t), raw.Fits(t)
	case LookBack:
		return p.LookBack.Bind(p.Tokens, p.hosts(), t), nil
	case Transition:
		if p.Transitions == nil {
			return nil, fmt.Errorf("the plan has no table of rank transitions")
		}
		return p.Transitions.Forecast(p.Tokens, p.hosts(), t), nil
	default:
		return p.Tokens.Forecast(t), nil
	}
}
