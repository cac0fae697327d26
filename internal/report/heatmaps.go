// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"context"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
)

const (
	// maxCells is the maximum number of cells on a side of a heat map. If there are more slots, several slots share a
	// cell.
	maxCells = 256
	// maxTokens is the maximum number of token IDs of a heat map. The most frequent token IDs are shown.
	maxTokens = 160
	// topQuantile is the quantile of the values of a heat map above which all values have the darkest color.
	topQuantile = 0.99
)

// Picture holds the heat maps of one MoE layer.
type Picture struct {
	Layer
	// Place is the position of the layer when layers are ordered by gain: "highest", "median" or "lowest".
	Place string
	// PairsBefore and PairsAfter show, today and with the plan, how many times as often as by chance the experts of a
	// pair of slots are activated together.
	PairsBefore, PairsAfter Heat
	// TokensBefore and TokensAfter show the most frequent token IDs by slot: how many times as often as the mean token
	// they activate the expert. TokensBefore is ordered by frequency, TokensAfter by the rank that the plan's tables
	// select.
	TokensBefore, TokensAfter Heat
}

// Heat is a heat map of values between Low (lightest) and Top (darkest).
type Heat struct {
	Rows, Columns int
	// Values has shape [Rows × Columns]. A negative value is a missing value.
	Values   []float32
	Low, Top float64
	// RowBounds and ColumnBounds are the boundaries of ranks, as fractions of the side.
	RowBounds, ColumnBounds []float64
}

// addPictures counts co-activations and adds the heat maps of the layers with the highest, the median and the lowest
// gain.
func (s *Score) addPictures(ctx context.Context, in *Input, today *placement.Placement) error {
	pairs, err := countCoactivations(ctx, in.Trace, in.Requests, in.Plan.Attention, in.Plan.Seed)
	if err != nil {
		return err
	}
	for l := range s.Layers {
		s.Layers[l].CoactivationBefore = pairs[l].withinRanks(today.Hosts(l))
		s.Layers[l].CoactivationAfter = pairs[l].withinRanks(in.Plan.Placement.Hosts(l))
	}
	counts, err := affinity.CountTokens(ctx, in.Trace, in.Requests)
	if err != nil {
		return err
	}
	order := s.byGain()
	for _, shown := range []struct {
		place string
		at    int
	}{{"highest", 0}, {"median", len(order) / 2}, {"lowest", len(order) - 1}} {
		l := order[shown.at]
		if slices.ContainsFunc(s.Pictures, func(p Picture) bool { return p.Layer.Layer == s.Layers[l].Layer }) {
			continue
		}
		p := Picture{Layer: s.Layers[l], Place: shown.place}
		p.PairsBefore, p.PairsAfter = pairs[l].heat(today, l), pairs[l].heat(in.Plan.Placement, l)
		p.TokensBefore, p.TokensAfter = tokenHeats(in.Plan, today, &counts[l], l)
		setScale(&p.PairsBefore, &p.PairsAfter)
		setScale(&p.TokensBefore, &p.TokensAfter)
		s.Pictures = append(s.Pictures, p)
	}
	return nil
}

// heat returns the heat map of the pairs of a placement's slots. A pair of the same expert has no value.
func (g *coactivation) heat(p *placement.Placement, l int) Heat {
	slots := p.Layers[l].Slots
	bounds := rankBounds(p)
	return draw(len(slots), len(slots), bounds, bounds, func(row, column int) float32 {
		if slots[row] == slots[column] {
			return -1
		}
		return float32(g.timesChance(slots[row], slots[column]))
	})
}

// rankBounds returns the boundaries of ranks within the slots of a layer.
func rankBounds(p *placement.Placement) []float64 {
	var bounds []float64
	for rank := 1; rank < p.Ranks; rank++ {
		bounds = append(bounds, float64(rank)/float64(p.Ranks))
	}
	return bounds
}

// tokenHeats returns the heat maps of the most frequent token IDs of a layer by the slots of both placements.
func tokenHeats(plan *solver.Plan, today *placement.Placement, c *affinity.Counts, l int) (before, after Heat) {
	tokens := frequent(c)
	lift := liftOf(c)
	byFrequency := tokens
	tokens = slices.Clone(tokens)
	rankOf := make(map[int]int, len(tokens))
	for _, token := range tokens {
		rankOf[token] = bestRank(plan, l, token)
	}
	slices.SortStableFunc(tokens, func(a, b int) int { return cmp.Compare(rankOf[a], rankOf[b]) })
	var bounds []float64
	for i := 1; i < len(tokens); i++ {
		if rankOf[tokens[i]] != rankOf[tokens[i-1]] {
			bounds = append(bounds, float64(i)/float64(len(tokens)))
		}
	}
	of := func(p *placement.Placement, rows []int, rowBounds []float64) Heat {
		slots := p.Layers[l].Slots
		return draw(len(rows), len(slots), rowBounds, rankBounds(p), func(row, column int) float32 { return lift(rows[row], slots[column]) })
	}
	return of(today, byFrequency, nil), of(plan.Placement, tokens, bounds)
}

// frequent returns the most frequent token IDs, at most maxTokens, in descending order of frequency.
func frequent(c *affinity.Counts) []int {
	var tokens []int
	for token, n := range c.Occurrences {
		if n > 0 {
			tokens = append(tokens, token)
		}
	}
	slices.SortStableFunc(tokens, func(a, b int) int { return cmp.Compare(c.Occurrences[b], c.Occurrences[a]) })
	return tokens[:min(maxTokens, len(tokens))]
}

// liftOf returns a function that computes how many times as often as the mean token a token activates an expert. It is
// 0 for an expert that is never activated.
func liftOf(c *affinity.Counts) func(token, expert int) float32 {
	totals, sum := c.ExpertTotals(), 0.0
	for _, n := range totals {
		sum += n
	}
	return func(token, expert int) float32 {
		experts, counts := c.Row(token)
		i, found := slices.BinarySearch(experts, uint16(expert))
		if !found {
			return 0
		}
		share := float64(counts[i]) / (float64(c.Occurrences[token]) * float64(c.TopK))
		return float32(share * sum / totals[expert])
	}
}

// bestRank returns the rank that the plan's tables select for a token ID.
func bestRank(plan *solver.Plan, l, token int) int {
	scores := make([]float32, plan.Placement.Ranks)
	if plan.Attention == placement.DataParallel {
		plan.Ranks.ScoreTokens(scores, []int32{int32(token)})
	} else {
		plan.Tokens.ScoreToken(scores, l, int32(token))
	}
	return slices.Index(scores, slices.Max(scores))
}

// draw returns a heat map of at most maxCells × maxCells cells. A cell is the mean of its non-missing values.
func draw(rows, columns int, rowBounds, columnBounds []float64, value func(row, column int) float32) Heat {
	h := Heat{Rows: min(rows, maxCells), Columns: min(columns, maxCells), RowBounds: rowBounds, ColumnBounds: columnBounds}
	h.Values = make([]float32, h.Rows*h.Columns)
	counts := make([]float32, len(h.Values))
	for row := range rows {
		for column := range columns {
			if v := value(row, column); v >= 0 {
				cell := row*h.Rows/rows*h.Columns + column*h.Columns/columns
				h.Values[cell] += v
				counts[cell]++
			}
		}
	}
	for cell, n := range counts {
		if n > 0 {
			h.Values[cell] /= n
		} else {
			h.Values[cell] = -1
		}
	}
	return h
}

// setScale gives two heat maps the same scale, from 1 (chance) to topQuantile of their values.
func setScale(a, b *Heat) {
	const minTop = 1.5 // a smaller scale would only show noise
	values := slices.Concat(a.Values, b.Values)
	slices.Sort(values)
	top := minTop
	if len(values) > 0 {
		top = max(minTop, float64(values[int(topQuantile*float64(len(values)-1))]))
	}
	a.Low, a.Top, b.Low, b.Top = 1, top, 1, top
}

// loadHeats returns the heat maps of the activations that each rank computes in each layer, on a common scale.
func (s *Score) loadHeats() (before, after Heat) {
	of := func(loads [][]float64) Heat {
		bounds := make([]float64, 0, len(loads[0]))
		for rank := 1; rank < len(loads[0]); rank++ {
			bounds = append(bounds, float64(rank)/float64(len(loads[0])))
		}
		return draw(len(loads), len(loads[0]), nil, bounds, func(row, column int) float32 { return float32(loads[row][column]) })
	}
	before, after = of(s.LoadBefore), of(s.LoadAfter)
	low, high := min(slices.Min(before.Values), slices.Min(after.Values)), max(slices.Max(before.Values), slices.Max(after.Values))
	before.Low, before.Top, after.Low, after.Top = float64(low), float64(high), float64(low), float64(high)
	return before, after
}
