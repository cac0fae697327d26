// SPDX-License-Identifier: Apache-2.0

// Package overlap chooses the overlap settings of an engine by the models of a plan: micro-batches, their thresholds,
// and multiprocessors for exchanges. spec.engine.overlap with mode Auto and kubectl semmoe advise use the same choice.
//
// Invariants:
//   - Choose is a pure function. Settings are chosen only if the engine supports them with the arguments of the spec,
//     and the modelled time falls by at least the minimum gain.
//   - Settings that are present are kept unless others are faster by the minimum gain.
package overlap

import (
	"cmp"
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/schedule"
)

// Model contains the models of a plan. SlotsPerRank is the number of experts of a rank, with copies.
type Model struct {
	Schedule     *schedule.Schedule
	Hardware     *hardware.Profile
	SlotsPerRank int
}

// Verdict is the result for a setting.
type Verdict string

const (
	// Change: other values are modelled to be faster.
	Change Verdict = "Change"
	// Keep: no other values are modelled to be faster by the minimum gain.
	Keep Verdict = "Keep"
	// Unsupported: the engine does not support other values.
	Unsupported Verdict = "Unsupported"
	// NotModelled: the plan has no figures.
	NotModelled Verdict = "NotModelled"
)

// MinSaved is the minimum relative saving for a change with a minimum gain of 0, for a threshold, and for a number of
// multiprocessors.
const MinSaved = 0.01

// Options are what the settings are chosen for.
type Options struct {
	// Ranks is the EP size in the spec. LAR is the local activation rate.
	Ranks int
	LAR   float64
	// BatchTokens are the batch sizes, over all ranks of a replica, with equal weights.
	BatchTokens []int32
	// MinGain is the minimum relative saving.
	MinGain float64
	// Present are the settings in use. Automatic reports that the operator chose them: a user's number of multiprocessors is
	// kept.
	Present   semmoev1.OverlapSpec
	Automatic bool
	// Adapter and Situation describe the engine, without overlap settings.
	Adapter   engine.Adapter
	Situation engine.Situation
}

// Choice is the result.
type Choice struct {
	Verdict Verdict
	// Values are the chosen settings: those present, unless the verdict is Change.
	Values semmoev1.OverlapSpec
	// Best are the best settings apart from the present ones.
	Best semmoev1.OverlapSpec
	// Before and After are the modelled times of an MoE layer in microseconds with the present settings and with Best,
	// Unsplit without micro-batches; 0 if not modelled.
	Before, After, Unsplit float64
	// Why explains the verdict. It may quote arguments of the user.
	Why string
}

// Microseconds returns the modelled time with the chosen settings; 0 if not modelled.
func (c *Choice) Microseconds() float64 {
	if c.Verdict == Change {
		return c.After
	}
	return c.Before
}

// Choose compares two micro-batches with none, at the batch sizes. m may be nil.
func Choose(m *Model, o Options) Choice {
	c := Choice{Values: o.Present}
	verdict := func(v Verdict, format string, args ...any) Choice {
		c.Verdict, c.Why = v, fmt.Sprintf(format, args...)
		return c
	}
	switch {
	case m == nil:
		return verdict(NotModelled, "the plan has no schedule: its profile does not contain the sizes of the model, or it has one rank")
	case m.Schedule.Ranks != o.Ranks:
		return verdict(NotModelled, "the plan is for %d ranks, and the spec has %d", m.Schedule.Ranks, o.Ranks)
	case len(o.BatchTokens) == 0:
		return verdict(NotModelled, "no batch size is known: engines report none, and the plan was made for none")
	}
	steps, err := m.Schedule.MicroBatches(m.Hardware, m.SlotsPerRank, o.LAR)
	if err != nil {
		return verdict(NotModelled, "%v", err)
	}
	thresholds := o.Adapter.OverlapThresholds
	none := semmoev1.OverlapSpec{CommunicationSMs: o.Present.CommunicationSMs}
	if o.Automatic {
		none = semmoev1.OverlapSpec{}
	}
	split := none
	split.MicroBatches, split.DistributionThresholdPercent = 2, o.Present.DistributionThresholdPercent
	if thresholds != nil {
		if from := steps.Threshold(2, MinSaved); from > 0 {
			split.DecodeThresholdTokens, split.PrefillThresholdTokens = int32(from), int32(from)
		}
	}
	time := func(s semmoev1.OverlapSpec) float64 { return mean(steps, o.BatchTokens, o.Ranks, s, thresholds) }
	c.Before, c.Unsplit, c.Best = time(o.Present), time(none), none
	if o.Present.MicroBatches == 0 || time(split) < c.Unsplit {
		c.Best = split
	}
	c.After = time(c.Best)
	if saved, least := 1-c.After/c.Before, max(o.MinGain, MinSaved); c.Best == o.Present || saved < least {
		return verdict(Keep, "with %s the modelled time of a layer changes by %+.1f%%; a change is made from -%.0f%%", Text(c.Best), 100*(c.After/c.Before-1), 100*least)
	}
	if err := Supports(o.Adapter, o.Situation, c.Best); err != nil {
		c.After = 0
		return verdict(Unsupported, "%v", err)
	}
	note := ""
	if sms, saved := steps.Multiprocessors(perRank(o.BatchTokens, o.Ranks), 2); c.Best.MicroBatches > 0 && c.Best.CommunicationSMs == 0 && saved >= MinSaved {
		with := c.Best
		with.CommunicationSMs = int32(sms)
		if err := Supports(o.Adapter, o.Situation, with); err != nil {
			note = fmt.Sprintf("; %d multiprocessors for exchanges are not set: %v", sms, err)
		} else {
			c.Best = with
		}
	}
	c.Values = c.Best
	if c.Best.MicroBatches == 0 {
		return verdict(Change, "at these batch sizes, micro-batches cost more than their overlap gains")
	}
	return verdict(Change, "the exchange of a micro-batch overlaps the products of the other one%s", note)
}

// perRank returns the tokens of a rank in steps of all ranks.
func perRank(sizes []int32, ranks int) []int {
	tokens := make([]int, len(sizes))
	for i, size := range sizes {
		tokens[i] = (int(size) + ranks - 1) / ranks
	}
	return tokens
}

// mean returns the mean modelled time over batch sizes, which have equal weights. Engines with thresholds split only
// steps from the threshold for decoding; steps with prompts are larger.
func mean(m *schedule.MicroBatches, sizes []int32, ranks int, o semmoev1.OverlapSpec, thresholds *engine.OverlapThresholds) float64 {
	sum := 0.0
	for _, tokens := range perRank(sizes, ranks) {
		batches := max(1, int(o.MicroBatches))
		if thresholds != nil && tokens < int(cmp.Or(o.DecodeThresholdTokens, thresholds.Decode)) {
			batches = 1
		}
		sum += m.Time(tokens, batches) / float64(len(sizes))
	}
	return sum
}

// Supports returns why the engine does not support overlap settings in a situation, or nil.
func Supports(adapter engine.Adapter, s engine.Situation, o semmoev1.OverlapSpec) error {
	s.Launch.Overlap = o
	if err := adapter.ValidateOverlap(s); err != nil {
		return err
	}
	if refusals := adapter.StartupSupport(s).Refusals; len(refusals) > 0 {
		return fmt.Errorf("%s", refusals[0].Message)
	}
	_, err := adapter.Args(s.Launch, s.UserArgs)
	return err
}

// Text describes overlap settings.
func Text(o semmoev1.OverlapSpec) string {
	text := "no micro-batches"
	if o.MicroBatches > 0 {
		text = fmt.Sprintf("%d micro-batches", o.MicroBatches)
	}
	if o.DecodeThresholdTokens > 0 {
		text += fmt.Sprintf(" from %d tokens of a rank", o.DecodeThresholdTokens)
	}
	if o.CommunicationSMs > 0 {
		text += fmt.Sprintf(", %d multiprocessors for exchanges", o.CommunicationSMs)
	}
	return text
}
