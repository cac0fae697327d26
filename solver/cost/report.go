package cost

// Report is the score of a plan on a set of requests. Shares are between 0 and 1, imbalances are at least 1. A figure that
// does not exist in the attention mode is nil.
type Report struct {
	// LAR is the local activation rate: activations whose expert has a copy on the token's rank / all activations.
	LAR float64 `json:"lar"`
	// BaselineLAR is that of the default placement (contiguous) with tokens or requests dealt out in turn.
	BaselineLAR float64 `json:"baseline_lar"`
	// OracleLAR is the most that dispatch could reach with this placement if it knew the routes. Attention TP: the best rank
	// of each token, without balance. Attention DP: the best assignment of the requests that loads no rank above the larger
	// of its fair share and what the policy loaded it with.
	// It is absent, as is UpperBound, where requests share what is computed: what then counts depends on the dispatch.
	OracleLAR float64 `json:"oracle_lar,omitempty"`
	// UpperBound is what no placement with equal slots and no dispatch can exceed on these requests.
	UpperBound float64 `json:"upper_bound,omitempty"`
	// Gap parts what is missing to an upper bound; nil without bounds.
	Gap *Gap `json:"gap,omitempty"`
	// TokenImbalance is the largest token load of a rank over the mean, TokenImbalanceMedian over the median.
	TokenImbalance       float64 `json:"token_imbalance"`
	TokenImbalanceMedian float64 `json:"token_imbalance_median"`
	// BatchImbalance is the token imbalance within a batch, mean over batches (attention TP).
	BatchImbalance *float64 `json:"batch_imbalance"`
	// WindowImbalance is the token imbalance of the last 128 requests, mean over time (attention DP).
	WindowImbalance *float64 `json:"window_imbalance"`
	// ExpertImbalance is the largest activation load of a rank's experts over the mean, ExpertWindowImbalance the same in
	// the windows of WindowImbalance (attention TP: in batches).
	ExpertImbalance       float64 `json:"expert_imbalance"`
	ExpertWindowImbalance float64 `json:"expert_window_imbalance"`
	// RemoteRanksPerToken is the number of distinct other ranks that hold experts of a token.
	RemoteRanksPerToken float64 `json:"remote_ranks_per_token"`
	// RemoteNodesPerToken is the number of distinct other nodes that do.
	RemoteNodesPerToken float64 `json:"remote_nodes_per_token"`
	// NodeLAR is the share of activations whose expert is on the token's node.
	NodeLAR float64 `json:"node_lar"`
	// MaxSend and MaxRecv are the activations that the busiest rank sends to and receives from others, as multiples of a
	// rank's fair share of all activations: 1 - LAR when everything is balanced.
	MaxSend float64 `json:"max_send"`
	MaxRecv float64 `json:"max_recv"`
	// ModelledUS is the modelled time of one MoE layer's two all-to-alls in microseconds; nil where the trace does not tell
	// the model's hidden size. Hardware names the profile that it is modelled by.
	ModelledUS *float64 `json:"modelled_us"`
	Hardware   string   `json:"hardware,omitempty"`
	// Volume is what dispatch and combination send; nil where not asked for.
	Volume *VolumeReport `json:"volume,omitempty"`
	// Reuse is about what ranks have cached (attention DP); nil where they are not asked to keep anything. All other figures count what
	// is computed: a cached token activates no expert, and is no load.
	Reuse *Reuse `json:"reuse,omitempty"`
	// PartialScores are figures of the same requests scored by their beginnings (attention DP); nil where not asked for.
	PartialScores *PartialScores `json:"partial_scores,omitempty"`
	// Decision is what spoke for the ranks that were chosen (attention DP); nil for the policy window.
	Decision *DecisionReport `json:"decision,omitempty"`
	// Line is how long requests stood in line with the policy late (attention DP); nil with others.
	Line *LineReport `json:"line,omitempty"`
	// PerLayer holds the figures of each MoE layer.
	PerLayer []LayerReport `json:"per_layer"`
	// ByRequest are the rates of each of Options.Requests, means over arrival orders (attention DP); nil where not asked for. It is not printed.
	ByRequest []Rates `json:"-"`
	// Detail is what the figures are means of; nil where not asked for. It is for pictures, and is not printed.
	Detail *Detail `json:"-"`
}

// Reuse tells what part of the prompts was not computed again.
type Reuse struct {
	// PrefixHitTokens are the tokens that the chosen rank had cached over all tokens of all prompts.
	PrefixHitTokens float64 `json:"prefix_hit_tokens"`
	// AllTokensLAR and AllTokensWindowImbalance are LAR and WindowImbalance as if nothing had been cached.
	AllTokensLAR             float64 `json:"all_tokens_lar"`
	AllTokensWindowImbalance float64 `json:"all_tokens_window_imbalance"`
}

// PartialScores are about scores that see only the beginning of each request.
type PartialScores struct {
	// Percent is the part of each request's tokens that is seen.
	Percent int `json:"percent"`
	// LAR is that of the whole requests, RestLAR that of the tokens that the scores have not seen.
	LAR     float64 `json:"lar"`
	RestLAR float64 `json:"rest_lar"`
	// WindowImbalance is as in Report.
	WindowImbalance float64 `json:"window_imbalance"`
}

// DecisionReport holds the components of the decisions taken, means over requests in microseconds (see dispatch.Decision).
type DecisionReport struct {
	Affinity float64 `json:"affinity_us"`
	Prefix   float64 `json:"prefix_us"`
	Price    float64 `json:"price_us"`
	Load     float64 `json:"load_us"`
}

func (r *DecisionReport) add(affinity, prefix, price, load, weight float64) {
	r.Affinity += weight * affinity
	r.Prefix += weight * prefix
	r.Price += weight * price
	r.Load += weight * load
}

// Gap parts the distance between the local activation rate and an upper bound by what causes it. The parts add up to that
// distance. The bound is one for dispatch without any balance: with attention TP it is UpperBound, with attention DP it may be
// above it, because UpperBound there holds for the loads of the policy alone.
type Gap struct {
	// Placement is the bound less what this placement would reach if every token or request took the best rank for the experts
	// that it really activates: what another placement could gain at most.
	Placement float64 `json:"placement"`
	// Forecast is that less what is reached when every token or request takes the rank of its highest score: what is lost
	// because routes are not known beforehand.
	Forecast float64 `json:"forecast"`
	// Balance is that less the local activation rate: what is given up so that the ranks have equal loads. It can be below 0 by
	// chance: the highest score is not always right, either.
	Balance float64 `json:"balance"`
}

// newGap is for a bound, the rate of the best rank on real routes and that of the highest score, both without balance.
func newGap(bound, oracle, scored, lar float64) *Gap {
	return &Gap{Placement: bound - oracle, Forecast: oracle - scored, Balance: scored - lar}
}

// LayerReport is the score of one MoE layer.
type LayerReport struct {
	// Layer is the model's layer index.
	Layer           int     `json:"layer"`
	LAR             float64 `json:"lar"`
	TokenImbalance  float64 `json:"token_imbalance"`
	ExpertImbalance float64 `json:"expert_imbalance"`
}

// figures are the parts of a Report that are means over layers, and over arrival orders.
type figures struct {
	lar, tokenImbalance, tokenImbalanceMedian, expertImbalance float64
	remoteRanks, remoteNodes, nodeLAR                          float64
	maxSend, maxRecv, exchange                                 float64
}

func (f *figures) add(g figures, weight float64) {
	addShare(&f.lar, weight*g.lar)
	f.tokenImbalance += weight * g.tokenImbalance
	f.tokenImbalanceMedian += weight * g.tokenImbalanceMedian
	f.expertImbalance += weight * g.expertImbalance
	f.remoteRanks += weight * g.remoteRanks
	f.remoteNodes += weight * g.remoteNodes
	addShare(&f.nodeLAR, weight*g.nodeLAR)
	f.maxSend += weight * g.maxSend
	f.maxRecv += weight * g.maxRecv
	f.exchange += weight * g.exchange
}

// addShare adds a part to a mean of shares: no rounding makes that more than 1, not even 48 times a 48th.
func addShare(mean *float64, part float64) { *mean = min(1, *mean+part) }

// fill turns the tallies of runs [run][layer] into the report's means.
func (r *Report) fill(runs [][]*tally, layers []int) {
	overall := figures{}
	r.PerLayer = make([]LayerReport, len(layers))
	for l, layer := range layers {
		mean := figures{}
		for _, run := range runs {
			mean.add(run[l].figures(), 1/float64(len(runs)))
		}
		r.PerLayer[l] = LayerReport{layer, mean.lar, mean.tokenImbalance, mean.expertImbalance}
		overall.add(mean, 1/float64(len(layers)))
	}
	r.LAR, r.NodeLAR = overall.lar, overall.nodeLAR
	r.RemoteRanksPerToken, r.RemoteNodesPerToken = overall.remoteRanks, overall.remoteNodes
	r.TokenImbalance, r.TokenImbalanceMedian, r.ExpertImbalance = overall.tokenImbalance, overall.tokenImbalanceMedian, overall.expertImbalance
	r.MaxSend, r.MaxRecv = overall.maxSend, overall.maxRecv
}

// exchange is the mean over layers and runs of the busiest rank's traffic, sent or received.
func exchange(runs [][]*tally) float64 {
	sum, n := 0.0, 0
	for _, run := range runs {
		for _, t := range run {
			sum += t.figures().exchange
			n++
		}
	}
	return sum / float64(n)
}
