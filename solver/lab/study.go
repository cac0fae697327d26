// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/trace"
)

// study is a profile whose placements are scored.
type study struct {
	steps       solver.Steps
	trace       *trace.Trace
	options     solver.Options
	train, test []int
}

func newStudy(t *trace.Trace, steps solver.Steps) *study {
	s := &study{steps: steps, trace: t, options: steps.Options()}
	s.train, s.test = steps.Split()
	return s
}

// with returns the study with other options and the same counts.
func (s *study) with(o solver.Options) *study { return newStudy(s.trace, s.steps.With(o)) }
