// SPDX-License-Identifier: Apache-2.0

package cost

// Report is the score of a plan on a set of requests. Shares are between 0 and 1, imbalances are at least 1. Figures
// that do not exist in the attention mode are nil.
type Report struct {
	// LAR is the local activation rate: activations whose expert has a copy on the token's rank / all activations.
	LAR float64 `json:"lar"`
	// BaselineLAR is the rate of the default placement (contiguous) with tokens or requests assigned round-robin.
	BaselineLAR float64 `json:"baseline_lar"`
	// OracleLAR is an upper bound for dispatch with this placement and known routes. Attention TP: the best rank of
	// each token, without balance. Attention DP: the best assignment of the requests in which each rank has at most the
	// larger of its fair share and its load under the policy. OracleLAR and UpperBound are absent if requests share
	// computed prefixes, because the counted tokens then depend on the dispatch.
	OracleLAR float64 `json:"oracle_lar,omitempty"`
	// UpperBound is an upper bound for all placements with equal slots and all dispatch policies on these requests.
	UpperBound float64 `json:"upper_bound,omitempty"`
	// Gap splits the distance to an upper bound by cause; nil without bounds.
	Gap *Gap `json:"gap,omitempty"`
	// TokenImbalance is the largest token load of a rank over the mean, TokenImbalanceMedian over the median.
	TokenImbalance       float64 `json:"token_imbalance"`
	TokenImbalanceMedian float64 `json:"token_imbalance_median"`
	// BatchImbalance is the token imbalance within a batch, mean over batches (attention TP).
	BatchImbalance *float64 `json:"batch_imbalance"`
	// WindowImbalance is the token imbalance of the last 128 requests, mean over time (attention DP).
	WindowImbalance *float64 `json:"window_imbalance"`
	// ExpertImbalance is the largest activation load of a rank's experts over the mean, ExpertWindowImbalance the same
	// in the windows of WindowImbalance (attention TP: in batches).
	ExpertImbalance       float64 `json:"expert_imbalance"`
	ExpertWindowImbalance float64 `json:"expert_window_imbalance"`
	// RemoteRanksPerToken is the number of distinct other ranks that compute experts of a token.
	RemoteRanksPerToken float64 `json:"remote_ranks_per_token"`
	// RemoteNodesPerToken is the number of distinct other nodes that compute experts of a token.
	RemoteNodesPerToken float64 `json:"remote_nodes_per_token"`
	// NodeLAR is the share of activations whose expert is on the token's node.
	NodeLAR float64 `json:"node_lar"`
	// MaxSend and MaxRecv are the activations that the busiest rank sends to and receives from others, as multiples of
	// a rank's fair share of all activations. Both are 1 - LAR if everything is balanced.
	MaxSend float64 `json:"max_send"`
	MaxRecv float64 `json:"max_recv"`
	// ModelledUS is the modelled time of one MoE layer's two all-to-alls in microseconds; nil if the trace does not
	// contain the model's hidden size. Hardware is the name of the hardware profile.
	ModelledUS *float64 `json:"modelled_us"`
	Hardware   string   `json:"hardware,omitempty"`
	// Volume is the traffic of dispatch and combine; nil if not requested.
	Volume *VolumeReport `json:"volume,omitempty"`
	// Reuse is the effect of prefix caches (attention DP); nil without caches. All other figures count only computed
	// tokens: a cached token activates no expert and adds no load.
	Reuse *Reuse `json:"reuse,omitempty"`
	// PartialScores are figures for scores of only the beginnings of the same requests (attention DP); nil if not
	// requested.
	PartialScores *PartialScores `json:"partial_scores,omitempty"`
	// Decision contains the mean components of the decisions (attention DP); nil for the policy window.
	Decision *DecisionReport `json:"decision,omitempty"`
	// Queue is the distribution of waiting times with the policy late (attention DP); nil for other policies.
	Queue *QueueReport `json:"line,omitempty"`
	// PerLayer contains the figures of each MoE layer.
	PerLayer []LayerReport `json:"per_layer"`
	// ByRequest contains the rates of each of Options.Requests, as means over arrival orders (attention DP); nil if not
	// requested. It is not printed.
	ByRequest []Rates `json:"-"`
	// Detail contains the values that the figures average; nil if not requested. It is used for charts and not printed.
	Detail *Detail `json:"-"`
}

// Reuse describes the prompt tokens that were not computed again.
type Reuse struct {
	// PrefixHitTokens is the ratio of tokens cached on the chosen rank to all prompt tokens.
	PrefixHitTokens float64 `json:"prefix_hit_tokens"`
	// AllTokensLAR and AllTokensWindowImbalance are LAR and WindowImbalance without caching.
	AllTokensLAR             float64 `json:"all_tokens_lar"`
	AllTokensWindowImbalance float64 `json:"all_tokens_window_imbalance"`
}

// PartialScores are figures for scores of only the beginning of each request.
type PartialScores struct {
	// Percent is the percentage of each request's tokens that the scores use.
	Percent int `json:"percent"`
	// LAR is the rate of the whole requests, RestLAR that of the tokens that the scores do not use.
	LAR     float64 `json:"lar"`
	RestLAR float64 `json:"rest_lar"`
	// WindowImbalance is the same as in Report.
	WindowImbalance float64 `json:"window_imbalance"`
}

// DecisionReport contains the components of the decisions, as means over requests in microseconds (see
// dispatch.Decision).
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

// Gap splits the distance between the local activation rate and an upper bound by cause. The parts sum to that
// distance. The bound holds for dispatch without balance. With attention TP it is UpperBound. With attention DP it may
// exceed UpperBound, which there holds only for the policy's loads.
type Gap struct {
	// Placement is the bound minus the rate of this placement if every token or request took its best rank on recorded
	// routes: the maximum gain of another placement.
	Placement float64 `json:"placement"`
	// Forecast is that rate minus the rate if every token or request took the rank of its highest score: the loss from
	// unknown routes.
	Forecast float64 `json:"forecast"`
	// Balance is that rate minus the local activation rate: the loss from balancing the loads. It can be negative by
	// chance, since the highest score is not always right.
	Balance float64 `json:"balance"`
}

// newGap splits the gap, given a bound and, without balance, the rate of the best rank on recorded routes (oracle) and
// that of the highest score (scored).
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

// addShare adds a part to a mean of shares, limited to 1 because of rounding (for example 48 times 1/48).
func addShare(mean *float64, part float64) { *mean = min(1, *mean+part) }

// fill computes the report's means from the tallies of runs [run][layer].
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

// exchange returns the mean over layers and runs of the busiest rank's traffic, sent or received.
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
