package pipeline

// Exposed is the time, in microseconds, in which something travels and nobody computes: neither the attention group nor the expert group
// has a task, and a link has. It is what a schedule has not hidden of the exchanges.
func (s *Schedule) Exposed() float64 {
	computed := s.covered(func(on Resource) bool { return on == AttentionGroup || on == ExpertGroup })
	return s.covered(func(Resource) bool { return true }) - computed
}

// covered is the time in which at least one of some resources is busy. Tasks are sorted by their start.
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

// exposedTasks bounds what is simulated for a share: a quarter of a million tasks take a fraction of a second.
const exposedTasks = 1 << 18

// ExposedShare is the part of the makespan in which exchanges are exposed. It is that of all layers, or of as many of the first as
// have exposedTasks tasks: layers are alike.
func (p *Plan) ExposedShare() (float64, error) {
	sizes := p.Sizes
	ofLayer := float64(sizes.MicroBatches) * (2 + 3*float64(sizes.Chunks))
	sizes.Layers = min(sizes.Layers, max(2, int(exposedTasks/ofLayer)))
	schedule, err := Simulate(p.Durations, sizes, p.Order)
	if err != nil {
		return 0, err
	}
	return schedule.Exposed() / schedule.Makespan, nil
}
