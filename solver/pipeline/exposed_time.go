// SPDX-License-Identifier: Apache-2.0

package pipeline

// Exposed returns the time, in microseconds, during which a link has a task but neither the attention group nor the
// expert group has one: the part of the exchanges that the schedule does not hide.
func (s *Schedule) Exposed() float64 {
	computed := s.covered(func(on Resource) bool { return on == AttentionGroup || on == ExpertGroup })
	return s.covered(func(Resource) bool { return true }) - computed
}

// covered returns the time during which at least one of the selected resources is busy. Tasks are sorted by start.
func (s *Schedule) covered(of func(on Resource) bool) float64 {
	sum, end := 0.0, 0.0
	for i := range s.Tasks {
		t := &s.Tasks[i]
		if of(t.On) && t.End > end {
			sum += t.End - max(t.Start, end)
			end = t.End
		}
	}
	return sum
}

// exposedTasks is the maximum number of simulated tasks: a quarter of a million tasks take a fraction of a second.
const exposedTasks = 1 << 18

// ExposedShare returns the share of the makespan with exposed exchanges. It simulates all layers, or as many of the
// first layers as have exposedTasks tasks: layers are similar.
func (p *Plan) ExposedShare() (float64, error) {
	sizes := p.Sizes
	ofLayer := float64(sizes.MicroBatches) * (2 + 3*float64(sizes.Chunks))
	sizes.Layers = min(sizes.Layers, max(2, int(exposedTasks/ofLayer)))
	schedule, err := simulate(p.Durations, sizes, p.Order)
	if err != nil {
		return 0, err
	}
	return schedule.Exposed() / schedule.Makespan, nil
}
