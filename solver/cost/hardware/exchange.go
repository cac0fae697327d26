package hardware

import "fmt"

// Line is a start-up time in microseconds and a rate, in work per microsecond.
type Line struct {
	Start          float64 `json:"start_us"`
	PerMicrosecond float64 `json:"per_us"`
}

// Microseconds is the time of that much work.
func (l Line) Microseconds(work float64) float64 { return l.Start + work/l.PerMicrosecond }

func (l Line) check() error {
	if !atLeastZero(l.Start) || !above(l.PerMicrosecond) {
		return fmt.Errorf("start_us is %v, per_us %v; the first must be at least 0, the second above 0", l.Start, l.PerMicrosecond)
	}
	return nil
}

// Exchange is what ranks send each other at once, by bytes. It takes the shorter of the times of two lines, as libraries have protocols that start
// early and others that send fast, and take what suits the size.
type Exchange struct {
	Line
	// Large is the line of large exchanges, which start later and send faster; nil where one line does as well.
	Large *Line `json:"large,omitempty"`
	Fit   Fit   `json:"fit"`
}

// Lines are those that the time is the shortest of.
func (e *Exchange) Lines() []Line {
	if e.Large == nil {
		return []Line{e.Line}
	}
	return []Line{e.Line, *e.Large}
}

// Microseconds is the time of that many bytes.
func (e *Exchange) Microseconds(bytes float64) float64 {
	us := e.Line.Microseconds(bytes)
	if e.Large != nil {
		us = min(us, e.Large.Microseconds(bytes))
	}
	return us
}

// Slower is the exchange where each byte takes so many times as long.
func (e Exchange) Slower(times float64) Exchange {
	e.PerMicrosecond /= times
	if e.Large != nil {
		large := *e.Large
		large.PerMicrosecond /= times
		e.Large = &large
	}
	return e
}

// Rate is what the largest exchanges come to, in bytes per microsecond.
func (e *Exchange) Rate() float64 {
	if e.Large != nil {
		return e.Large.PerMicrosecond
	}
	return e.PerMicrosecond
}

// Check names the member that is not as it must be.
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

// Bipartite is the exchange between an attention group and an expert group of given sizes, one way.
type Bipartite struct {
	AttentionRanks int      `json:"attention_ranks"`
	ExpertRanks    int      `json:"expert_ranks"`
	Exchange       Exchange `json:"line"`
}

// Between is the exchange between groups of those sizes: as measured, else that of an all-to-all.
func (p *Profile) Between(attentionRanks, expertRanks int) *Exchange {
	for i := range p.A2E {
		if b := &p.A2E[i]; b.AttentionRanks == attentionRanks && b.ExpertRanks == expertRanks {
			return &b.Exchange
		}
	}
	return &p.AllToAll
}

// The all-to-alls that a profile is judged by: those above leastJudged bytes, of which none should be modelled further off than allowedError, a part
// of the measured time.
const (
	leastJudged  = 1 << 20
	allowedError = 0.15
)

// Reproduced counts the measured all-to-alls of more than 1 MiB, and those of them whose modelled time is within 15% of the measured one.
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
