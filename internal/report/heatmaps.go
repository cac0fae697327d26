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
	// maxCells is the most cells on a side of a picture; more slots are drawn several to a cell.
	maxCells = 256
	// mostTokens is how many token ids a picture shows, the most frequent ones.
	mostTokens = 160
	// brightest is the quantile of a picture's values from which on all have the darkest colour.
	brightest = 0.99
)

// Picture shows one MoE layer.
type Picture struct {
	// Layer is the layer, Rank its place by gain: "highest", "median" or "lowest".
	Layer
	Place string
	// Pairs are the pairs of slots today and with the plan: how many times as often as chance their experts fire together.
	PairsBefore, PairsAfter Heat
	// Tokens are the most frequent token ids by slots: how many times as often as the mean token they activate the expert. Today they
	// are in order of frequency; with the plan those come together that its tables send to the same rank.
	TokensBefore, TokensAfter Heat
}

// Heat is a picture of values, drawn from Low (palest) to Top (darkest).
type Heat struct {
	Rows, Columns int
	// Values are [rows × columns]; below 0 is none.
	Values   []float32
	Low, Top float64
	// RowBounds and ColumnBounds are where a rank ends and the next begins, in parts of the side.
	RowBounds, ColumnBounds []float64
}

// addPictures counts which experts fire together, and shows the layers of the highest, the median and the lowest gain.
func (s *Score) addPictures(ctx context.Context, in *Input, today *placement.Placement) error {
	pairs, err := countTogether(ctx, in.Trace, in.Requests, in.Plan.Attention, in.Plan.Seed)
	if err != nil {
		return err
	}
	for l := range s.Layers {
		s.Layers[l].TogetherBefore = pairs[l].withinRanks(today.Hosts(l))
		s.Layers[l].TogetherAfter = pairs[l].withinRanks(in.Plan.Placement.Hosts(l))
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
		alike(&p.PairsBefore, &p.PairsAfter)
		alike(&p.TokensBefore, &p.TokensAfter)
		s.Pictures = append(s.Pictures, p)
	}
	return nil
}

// heat draws the pairs of a placement's slots. A slot with itself, or with a copy of its expert, has no value.
func (g *together) heat(p *placement.Placement, l int) Heat {
	slots := p.Layers[l].Slots
	bounds := rankBounds(p)
	return draw(len(slots), len(slots), bounds, bounds, func(row, column int) float32 {
		if slots[row] == slots[column] {
			return -1
		}
		return float32(g.timesChance(slots[row], slots[column]))
	})
}

// rankBounds are where ranks end within a layer's slots.
func rankBounds(p *placement.Placement) []float64 {
	var bounds []float64
	for rank := 1; rank < p.Ranks; rank++ {
		bounds = append(bounds, float64(rank)/float64(p.Ranks))
	}
	return bounds
}

// tokenHeats draw the most frequent token ids of a layer by the slots of both placements.
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

// frequent are the token ids that occur most, the most frequent first.
func frequent(c *affinity.Counts) []int {
	var tokens []int
	for token, n := range c.Occurrences {
		if n > 0 {
			tokens = append(tokens, token)
		}
	}
	slices.SortStableFunc(tokens, func(a, b int) int { return cmp.Compare(c.Occurrences[b], c.Occurrences[a]) })
	return tokens[:min(mostTokens, len(tokens))]
}

// liftOf tells how many times as often as the mean token one activates an expert; 0 for an expert that nothing activates.
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

// bestRank is where the plan's tables send a token id.
func bestRank(plan *solver.Plan, l, token int) int {
	scores := make([]float32, plan.Placement.Ranks)
	if plan.Attention == placement.DataParallel {
		plan.Ranks.ScoreTokens(scores, []int32{int32(token)})
	} else {
		plan.Tokens.ScoreToken(scores, l, int32(token))
	}
	return slices.Index(scores, slices.Max(scores))
}

// draw makes a picture of at most maxCells on a side: a cell is the mean of what falls into it and has a value.
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

// alike gives two pictures one scale, from chance (once) to the quantile that is brightest.
func alike(a, b *Heat) {
	const least = 1.5 // a scale below is one of noise
	values := slices.Concat(a.Values, b.Values)
	slices.Sort(values)
	top := least
	if len(values) > 0 {
		top = max(least, float64(values[int(brightest*float64(len(values)-1))]))
	}
	a.Low, a.Top, b.Low, b.Top = 1, top, 1, top
}

// loadHeats draw what ranks compute, layer by layer, on one scale: from the least to the most.
func (s *Score) loadHeats() (before, after Heat) {
	of := func(loads [][]float64) Heat {
		bounds := make([]float64, 0, len(loads[0]))
		for rank := 1; rank < len(loads[0]); rank++ {
			bounds = append(bounds, float64(rank)/float64(len(loads[0])))
		}
		return draw(len(loads), len(loads[0]), nil, bounds, func(row, column int) float32 { return float32(loads[row][column]) })
	}
	before, after = of(s.LoadBefore), of(s.LoadAfter)
	least, most := min(slices.Min(before.Values), slices.Min(after.Values)), max(slices.Max(before.Values), slices.Max(after.Values))
	before.Low, before.Top, after.Low, after.Top = float64(least), float64(most), float64(least), float64(most)
	return before, after
}
