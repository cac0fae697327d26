package placement

import "context"

// ValueTokens is what the search of attention tensor parallelism makes of one placement of the first layer.
func ValueTokens(ctx context.Context, p Problem, rankOf []int) float64 {
	_, value := newLayerSearch(&p.Tokens[0], p.Ranks, limit{ctx: ctx}).value(rankOf, nil)
	return value
}
