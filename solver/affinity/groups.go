// SPDX-License-Identifier: Apache-2.0

package affinity

// Grouped returns the counts of groups of size consecutive experts; size must divide the number of experts. A rank that
// holds whole groups has the same counts in both forms.
func (c *Counts) Grouped(size int) *Counts {
	g := &Counts{Experts: c.Experts / size, TopK: c.TopK, Index: c.Index, Start: make([]int, 1, len(c.Start)), Occurrences: c.Occurrences}
	row := make([]float32, g.Experts)
	for r, begin := range c.Start[:len(c.Start)-1] {
		for i := begin; i < c.Start[r+1]; i++ {
			row[int(c.Expert[i])/size] += c.Count[i]
		}
		g.appendRow(row)
		g.Start = append(g.Start, len(g.Expert))
	}
	return g
}

// Grouped returns the counts of groups of size consecutive experts.
func (c *RequestCounts) Grouped(size int) *RequestCounts {
	g := *c
	g.Experts = c.Experts / size
	g.Rows = make([][]float32, len(c.Rows))
	for r, row := range c.Rows {
		// The experts of a layer are a multiple of size, so a group never crosses a layer.
		g.Rows[r] = make([]float32, len(row)/size)
		for i, n := range row {
			g.Rows[r][i/size] += n
		}
	}
	return &g
}

// Grouped returns the co-activations of groups of size consecutive experts. The diagonal counts pairs of experts within
// a group.
func (p *Pairs) Grouped(size int) Pairs {
	n := p.Experts / size
	g := Pairs{n, make([]float32, n*n), make([]float32, n*n)}
	for i := range p.Together {
		at := i/p.Experts/size*n + i%p.Experts/size
		g.Together[at] += p.Together[i]
		g.Within[at] += p.Within[i]
	}
	return g
}
