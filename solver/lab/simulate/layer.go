// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"

	"github.com/semmoe/operator/solver/cost/hardware"
)

// Counts contains the work of a MoE layer for a batch.
type Counts struct {
	// Tokens is the number of tokens of each rank [ranks].
	Tokens []int
	// Rows is the number of pairs of a token and one of its experts, by the token's rank and the rank that computes the
	// expert [from × to]. Distinct is the number of distinct tokens among them: a token with several experts on a rank
	// counts once.
	Rows, Distinct []int
	// Experts is the number of rows of each slot [ranks × slots].
	Experts []int
}

// newCounts returns empty counts.
func newCounts(ranks, slotsPerRank int) *Counts {
	return &Counts{
		Tokens: make([]int, ranks), Rows: make([]int, ranks*ranks), Distinct: make([]int, ranks*ranks), Experts: make([]int, ranks*slotsPerRank),
	}
}

func (c *Counts) clear() {
	clear(c.Tokens)
	clear(c.Rows)
	clear(c.Distinct)
	clear(c.Experts)
}

// Messages is the unit of communication between ranks.
type Messages string

// The messages.
const (
	// PerActivation sends a token once for each of its experts, and returns the output of each expert.
	PerActivation Messages = "activation"
	// PerRank sends a token once to each rank with experts of the token. The rank sums their outputs and returns the
	// sum.
	PerRank Messages = "rank"
)

// Layer contains the properties of a MoE layer that determine its time.
type Layer struct {
	// Hidden is the width of the residual stream, ExpertSize the width of an expert, Experts the number of routed
	// experts.
	Hidden, ExpertSize, Experts int
	// Messages is the unit of communication. DispatchBytes is the size of a value sent to an expert, 2 with bf16;
	// values return in bf16.
	Messages      Messages
	DispatchBytes float64
	// Kernels are the kernels in addition to exchanges and products.
	Kernels Kernels
}

// Kernels describes the kernels that a rank runs in addition to exchanges and products.
type Kernels struct {
	// Choose is the time of selecting experts as a function of the number of scores of the rank's tokens; a rate of 0
	// means none.
	Choose hardware.Line
	// Sent is the number of times that the hidden values of a row are read or written before the row is sent.
	Sent float64
	// Hidden and Expert are the numbers of times that the hidden values of a row, and the values within its expert, are
	// read or written between the products.
	Hidden, Expert float64
	// Sums means that results are summed, for each message on the rank of the experts and for each token on its own
	// rank, in two kernels in addition to the exchange.
	Sums bool
}

// engineKernels are the kernels of inference engines: rows are gathered to be sent, and again to be sorted by expert;
// one kernel reads gate and up projection and writes their product; results are summed. Experts are selected in the
// kernel of the scores.
var engineKernels = Kernels{Sent: 2, Hidden: 2, Expert: 3, Sums: true}

const (
	bf16 = 2
	// gathering and strided are the rates of moving rows, relative to the rate at which grouped products read weights.
	// gathering applies to kernels that gather or sum rows; it is the rate of plain copies on the same GPUs. strided
	// applies to tensor operations between products; it is fitted to layers measured on two H200 (see
	// TestMeasuredRoutes and TestMeasuredPieces).
	gathering, strided = 1.3, 0.65
	// tileRows is the number of rows that a grouped product computes together; the last tile of an expert is usually
	// not full.
	tileRows = 128
)

// LayerTime is the time of a MoE layer by stage, in microseconds, on the slowest rank of each stage.
type LayerTime struct {
	// Gate is the selection of experts, Dispatch the exchange to them, Products their computation, Combine the exchange
	// back.
	Gate, Dispatch, Products, Combine float64
}

// Total returns the sum of the stages.
func (t LayerTime) Total() float64 { return t.Gate + t.Dispatch + t.Products + t.Combine }

// Time returns the time of the layer for the given counts. It is a pure function and the unit of a simulation step. A
// single rank exchanges nothing.
func (l *Layer) Time(p *hardware.Profile, t *Topology, c *Counts) LayerTime {
	us := LayerTime{Gate: l.gate(p, slices.Max(c.Tokens))}
	slots := len(c.Experts) / t.Ranks
	for rank := range t.Ranks {
		us.Products = max(us.Products, l.products(p, c.Experts[rank*slots:(rank+1)*slots]))
	}
	if t.Ranks == 1 {
		return us
	}
	messages := c.Rows
	if l.Messages == PerRank {
		messages = c.Distinct
	}
	gathered, summed := l.moved(t.Ranks, messages, c)
	speed := gathering * p.Grouped.BytesPerMicrosecond
	us.Dispatch = gathered/speed + t.Exchange(messages, float64(l.Hidden)*l.DispatchBytes)
	// The same messages return: the busiest sender is now the busiest receiver.
	us.Combine = summed/speed + t.Exchange(messages, float64(l.Hidden)*bf16)
	if l.Kernels.Sums {
		us.Combine += 2 * p.Dense.Start
	}
	return us
}

// gate returns the time of scoring a rank's tokens and selecting their experts.
func (l *Layer) gate(p *hardware.Profile, tokens int) float64 {
	us := p.Dense.Microseconds(float64(l.Hidden*l.Experts), float64(tokens))
	if l.Kernels.Choose.PerMicrosecond > 0 {
		us += l.Kernels.Choose.Microseconds(float64(tokens * l.Experts))
	}
	return us
}

// moved returns the bytes that the busiest rank reads and writes to gather rows before sending, and to sum results:
// rows into messages on the rank of the experts, and messages, including those to itself, into tokens on their own
// rank.
func (l *Layer) moved(ranks int, messages []int, c *Counts) (gathered, summed float64) {
	row := float64(l.Hidden) * bf16
	for rank := range ranks {
		rows, sent, received := 0, 0, 0
		for other := range ranks {
			rows += c.Rows[other*ranks+rank]
			sent += messages[rank*ranks+other]
			received += messages[other*ranks+rank]
		}
		gathered = max(gathered, l.Kernels.Sent*row*float64(sent-messages[rank*ranks+rank]))
		if l.Kernels.Sums {
			summed = max(summed, row*float64(rows+received+sent+c.Tokens[rank]))
		}
	}
	return gathered, summed
}

// products returns the time of a rank's experts: gate and up projections in one grouped kernel, down projections in
// another, and the kernels between. Only experts with rows are read, and a partially filled tile takes as long as a
// full one.
func (l *Layer) products(p *hardware.Profile, experts []int) float64 {
	rows, padded, active := 0, 0, 0
	for _, n := range experts {
		rows += n
		padded += (n + tileRows - 1) / tileRows * tileRows
		if n > 0 {
			active++
		}
	}
	if rows == 0 {
		return 0
	}
	expert := float64(active) * float64(l.Hidden) * float64(l.ExpertSize)
	perExpert := float64(padded) / float64(active)
	moved := float64(rows) * (l.Kernels.Hidden*float64(l.Hidden) + l.Kernels.Expert*float64(l.ExpertSize)) * bf16
	return p.Grouped.Block(expert, perExpert) + moved/(strided*p.Grouped.BytesPerMicrosecond)
}
