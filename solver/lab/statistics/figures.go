// SPDX-License-Identifier: Apache-2.0

package statistics

// Figures returns pointers to all fields in a fixed order, to average over several values.
func (p *Prediction) Figures() []*float64 { return []*float64{&p.Precision, &p.Recall, &p.F1} }

// Figures returns pointers to all fields in a fixed order.
func (c *Concentration) Figures() []*float64 {
	return []*float64{&c.Kurtosis, &c.Above8, &c.Covered, &c.RestHotness, &c.RestUniform}
}

// Figures returns pointers to all fields in a fixed order.
func (p *Partners) Figures() []*float64 { return []*float64{&p.Share, &p.Uniform} }

// Figures returns pointers to all fields in a fixed order.
func (g *Guess) Figures() []*float64 { return []*float64{&g.Confidence, &g.Accuracy, &g.Known} }
