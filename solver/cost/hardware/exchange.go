// SPDX-License-Identifier: Apache-2.0

package hardware

import "fmt"

// Line is a linear time model: a start-up time in microseconds, and a rate in work per microsecond.
type Line struct {
	Start          float64 `json:"start_us"`
	PerMicrosecond float64 `json:"per_us"`
}

// Microseconds returns the time for the given work.
func (l Line) Microseconds(work float64) float64 { return l.Start + work/l.PerMicrosecond }

func (l Line) check() error {
	if !atLeastZero(l.Start) || !above(l.PerMicrosecond) {
		return fmt.Errorf("start_us is %v, per_us %v; the first must be at least 0, the second above 0", l.Start, l.PerMicrosecond)
	}
	return nil
}

// Exchange models a collective exchange as a function of bytes. Its time is the minimum of two lines, because libraries
// switch between protocols with low latency and protocols with high bandwidth.
type Exchange struct {
	Line
	// Large is the line of large exchanges, with a longer start-up time and a higher rate; nil if one line suffices.
	Large *Line `json:"large,omitempty"`
	Fit   Fit   `json:"fit"`
}

// Lines returns the lines whose minimum is the time.
func (e *Exchange) Lines() []Line {
	if e.Large == nil {
		return []Line{e.Line}
	}
	return []Line{e.Line, *e.Large}
}

// Microseconds returns the time for the given number of bytes.
func (e *Exchange) Microseconds(bytes float64) float64 {
	us := e.Line.Microseconds(bytes)
	if e.Large != nil {
		us = min(us, e.Large.Microseconds(bytes))
	}
	return us
}

// Slower returns the exchange with the time per byte multiplied by times.
func (e Exchange) Slower(times float64) Exchange {
	e.PerMicrosecond /= times
	if e.Large != nil {
		large := *e.Large
		large.PerMicrosecond /= times
		e.Large = &large
	}
	return e
}

// Rate returns the rate of the largest exchanges, in bytes per microsecond.
func (e *Exchange) Rate() float64 {
	if e.Large != nil {
		return e.Large.PerMicrosecond
	}
	return e.PerMicrosecond
}

// Check returns an error for the first invalid member.
func (e *Exchange) Check() error {
	if err := e.Line.check(); err != nil || e.Large == nil {
		return err
	}
	if err := e.Large.check(); err != nil {
		return fmt.Errorf("large: %w", err)
	}
	if e.Large.Start < e.Start || e.Large.PerMicrosecond < e.PerMicrosecond {
		return fmt.Errorf("large: start_us is %v, per_us %v; they must be at least %v and %v, those of smaller exchanges",
			e.Large.Start, e.Large.PerMicrosecond, e.Start, e.PerMicrosecond)
	}
	return nil
}

// Bipartite is the exchange between an attention group and an expert group of given sizes, in one direction.
type Bipartite struct {
	AttentionRanks int      `json:"attention_ranks"`
	ExpertRanks    int      `json:"expert_ranks"`
	Exchange       Exchange `json:"line"`
}

// Between returns the exchange between groups of the given sizes: the measured one, else the all-to-all.
func (p *Profile) Between(attentionRanks, expertRanks int) *Exchange {
	for i := range p.A2E {
		if b := &p.A2E[i]; b.AttentionRanks == attentionRanks && b.ExpertRanks == expertRanks {
			return &b.Exchange
		}
	}
	return &p.AllToAll
}

// The all-to-alls that validate a profile: those above leastJudged bytes. The modelled time of each should be within
// allowedError of the measured time, as a fraction.
const (
	leastJudged  = 1 << 20
	allowedError = 0.15
)

// Reproduced returns the number of measured all-to-alls above 1 MiB, and how many of them have a modelled time within
// 15% of the measured one.
func (p *Profile) Reproduced(c *Calibration) (within, of int) {
	for _, m := range c.AllToAll {
		if m.Bytes <= leastJudged {
			continue
		}
		of++
		if e := p.AllToAll.Microseconds(m.Bytes)/m.Microseconds - 1; -allowedError <= e && e <= allowedError {
			within++
		}
	}
	return within, of
}
