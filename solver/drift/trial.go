// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"context"
	"slices"
)

// Change describes a change of traffic.
type Change struct {
	// Drop is the relative reduction of the local share of every request.
	Drop float64
	// To are the requests that replace the current requests; nil keeps them.
	To []Request
}

// Delays simulates runs of traffic with a change and returns the detection delay of each run, ascending, in sampled
// requests from the change to the alarm. Each run starts with traffic without the change. A run without an alarm has
// the delay limit.
func (c *Calibration) Delays(ctx context.Context, requests []Request, change Change, order Order, runs, limit int) ([]int, error) {
	delays, requests := make([]int, runs), mergeRareKinds(c.Text.apply(requests))
	if change.To != nil {
		change.To = c.Text.apply(change.To)
	}
	for run := range delays {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		runOrder := order
		runOrder.Seed += uint64(run)
		traffic, err := newSimulator(requests, runOrder)
		if err != nil {
			return nil, err
		}
		delays[run] = c.delay(traffic, change, limit)
	}
	slices.Sort(delays)
	return delays, nil
}

// warmupRequests is the number of requests before the change, after which prices and statistic are in their steady
// state.
const warmupRequests = 300

// delay returns the detection delay of one run.
func (c *Calibration) delay(traffic *simulator, change Change, limit int) int {
	var statistic Statistic
	for range warmupRequests {
		if statistic = c.Next(statistic, traffic.nextSample()); c.Drifted(statistic) {
			statistic = Statistic{} // a false alarm before the change is not a detection
		}
	}
	if change.To != nil {
		traffic.replaceRequests(change.To)
	}
	for delay := range limit {
		s := traffic.nextSample()
		s.Local *= 1 - change.Drop
		if statistic = c.Next(statistic, s); c.Drifted(statistic) {
			return delay + 1
		}
	}
	return limit
}

// Alarms counts the false alarms in the given number of simulated requests without a change. The statistic restarts at
// zero after each alarm.
func (c *Calibration) Alarms(ctx context.Context, requests []Request, order Order, steps int) (int, error) {
	traffic, err := newSimulator(mergeRareKinds(c.Text.apply(requests)), order)
	if err != nil {
		return 0, err
	}
	alarms := 0
	var statistic Statistic
	for i := range steps {
		if i%stepsPerCheck == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if statistic = c.Next(statistic, traffic.nextSample()); c.Drifted(statistic) {
			alarms++
			statistic = Statistic{}
		}
	}
	return alarms, nil
}
