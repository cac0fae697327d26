// SPDX-License-Identifier: Apache-2.0

package eps

import "math"

// Part is the duration of a stage for one of N groups: Start + Work/N.
type Part struct{ Start, Work float64 }

// of returns the duration of one group.
func (p Part) of(groups int) float64 { return p.Start + p.Work/float64(groups) }

// Stages are the stages of a MoE layer on a rank.
type Stages struct {
	Dispatch, Experts, Combine Part
	// Shared is the time of the shared experts, which run while the first group's tokens are in transit; 0 if there are
	// none.
	Shared float64
	// OneLink means that dispatch and combine use the same streaming multiprocessors and are therefore sequential.
	OneLink bool
}

// Time returns the duration of the layer with N groups.
//
// On one link all groups are dispatched before any group is combined: the experts then wait as little as possible, and
// the combines lose nothing, because their work does not depend on their time.
func (s Stages) Time(groups int) float64 {
	dispatch, work, combine := s.Dispatch.of(groups), s.Experts.of(groups), s.Combine.of(groups)
	computed, combined := s.Shared, 0.0
	if s.OneLink {
		combined = float64(groups) * dispatch
	}
	for n := 1; n <= groups; n++ {
		computed = max(computed, float64(n)*dispatch) + work
		combined = max(combined, computed) + combine
	}
	return combined
}

// Best returns the number of groups, up to maxGroups (the experts of the rank), with the shortest time; ties go to the
// lower number. One group is the baseline.
func (s Stages) Best(maxGroups int) (groups int, time float64) {
	groups, time = 1, s.Time(1)
	for n := 2; n <= maxGroups; n++ {
		if t := s.Time(n); t < time {
			groups, time = n, t
		}
	}
	return groups, time
}

// Share returns the number of a GPU's multiprocessors for communication, in pairs as kernels use them, the best number
// of groups, and the time. The durations of the stages assume that communication has as many multiprocessors as it can
// use (enough), and experts have all of them. With fewer, durations grow in proportion.
func (s Stages) Share(all, enough, maxGroups int) (communication, groups int, time float64) {
	time = math.Inf(1)
	for n := 2; n <= min(enough, all-1); n += 2 {
		if g, t := s.With(n, all, enough).Best(maxGroups); t < time {
			communication, groups, time = n, g, t
		}
	}
	return communication, groups, time
}

// With returns the stages with the given number of multiprocessors for communication, and the others for experts. The
// assumptions are those of Share.
func (s Stages) With(communication, all, enough int) Stages {
	slower, rest := float64(enough)/float64(communication), float64(all)/float64(all-communication)
	shared := s
	shared.Dispatch.Work, shared.Combine.Work = s.Dispatch.Work*slower, s.Combine.Work*slower
	shared.Experts.Work, shared.Shared = s.Experts.Work*rest, s.Shared*rest
	return shared
}
