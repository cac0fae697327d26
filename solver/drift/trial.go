package drift

import (
	"context"
	"slices"
)

// Change is what happens to traffic.
type Change struct {
	// Drop lowers the local share of every request, in proportion.
	Drop float64
	// To are the requests that come instead; nil for the same ones.
	To []Request
}

// Delays are the numbers of sampled requests between a change and the alarm, ascending, in a number of runs, each of them begun
// with undisturbed traffic; limit stands for an alarm that does not come before as many.
func (c *Calibration) Delays(ctx context.Context, requests []Request, change Change, order Order, runs, limit int) ([]int, error) {
	delays, requests := make([]int, runs), together(c.Text.told(requests))
	if change.To != nil {
		change.To = c.Text.told(change.To)
	}
	for run := range delays {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		of := order
		of.Seed += uint64(run)
		traffic, err := NewTraffic(requests, of)
		if err != nil {
			return nil, err
		}
		delays[run] = c.delay(traffic, change, limit)
	}
	slices.Sort(delays)
	return delays, nil
}

// undisturbed is the number of requests before a change: prices and statistic are then as they usually are.
const undisturbed = 300

// delay is that of one run.
func (c *Calibration) delay(traffic *Traffic, change Change, limit int) int {
	var statistic Statistic
	for range undisturbed {
		if statistic = c.Next(statistic, traffic.Next()); c.Drifted(statistic) {
			statistic = Statistic{} // a false alarm finds no change
		}
	}
	if change.To != nil {
		traffic.Switch(change.To)
	}
	for delay := range limit {
		s := traffic.Next()
		s.Local *= 1 - change.Drop
		if statistic = c.Next(statistic, s); c.Drifted(statistic) {
			return delay + 1
		}
	}
	return limit
}

// Alarms counts the alarms in a number of undisturbed requests; the statistic begins anew after each.
func (c *Calibration) Alarms(ctx context.Context, requests []Request, order Order, steps int) (int, error) {
	traffic, err := NewTraffic(together(c.Text.told(requests)), order)
	if err != nil {
		return 0, err
	}
	alarms := 0
	var statistic Statistic
	for i := range steps {
		if i%stepsPerCheck == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if statistic = c.Next(statistic, traffic.Next()); c.Drifted(statistic) {
			alarms++
			statistic = Statistic{}
		}
	}
	return alarms, nil
}
