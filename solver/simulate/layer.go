package simulate

import (
	"slices"

	"github.com/semmoe/operator/solver/cost/hardware"
)

// Counts are what a MoE layer does with a batch.
type Counts struct {
	// Tokens are those of each rank [ranks].
	Tokens []int
	// Rows are pairs of a token and an expert of it, by the token's rank and the one that computes the expert [from × to]; Distinct are the
	// tokens among them: with several experts on a rank it counts once.
	Rows, Distinct []int
	// Experts are the rows of each slot [ranks × slots].
	Experts []int
}

// NewCounts are those of nothing.
func NewCounts(ranks, slotsPerRank int) *Counts {
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

// Messages says what ranks send each other.
type Messages string

// The messages.
const (
	// PerActivation sends a token once for each of its experts, and brings each one's output back.
	PerActivation Messages = "activation"
	// PerRank sends a token once to each rank that has experts of it, which adds their outputs up before they come back.
	PerRank Messages = "rank"
)

// Layer is what of a MoE layer its time depends on.
type Layer struct {
	// Hidden is the width of the residual stream, ExpertSize that of an expert, Experts the number of routed experts.
	Hidden, ExpertSize, Experts int
	// Messages says what is exchanged; DispatchBytes are the bytes of a value on its way to an expert, 2 with bf16; it comes back in bf16.
	Messages      Messages
	DispatchBytes float64
	// Kernels are what is run beside exchanges and products.
	Kernels Kernels
}

// Kernels are what a rank runs beside exchanges and products.
type Kernels struct {
	// Choose is the time of choosing experts, by the number of scores of the rank's tokens; without a rate there is none.
	Choose hardware.Line
	// Sent is how many times the hidden values of a row are read or written before it is sent.
	Sent float64
	// Hidden and Expert are how many times the hidden values of a row, and those within its expert, are read or written between the products.
	Hidden, Expert float64
	// Sums are those of results, for each message on the rank of the experts, and for each token at home, in two kernels beyond the exchange.
	Sums bool
}

// EngineKernels are those of engines: rows are gathered to be sent, and again to be sorted by expert, one kernel reads gate and up projection
// and writes their product, and results are summed. Experts are chosen in the kernel of the scores.
var EngineKernels = Kernels{Sent: 2, Hidden: 2, Expert: 3, Sums: true}

const (
	bf16 = 2
	// gathering and strided are how fast rows are moved, over the rate at which grouped products read weights: in kernels that gather or sum
	// rows, which is what plain copies reached on the same GPUs, and in those of tensor operations between products, which is what brings layers
	// measured on two H200 nearest (see TestMeasuredRoutes and TestMeasuredPieces).
	gathering, strided = 1.3, 0.65
	// tileRows are the rows that a grouped product computes at once: an expert's last tile is seldom full.
	tileRows = 128
)

// LayerTime is the time of a MoE layer by its stages, in microseconds, each that of the slowest rank.
type LayerTime struct {
	// Gate is the choice of experts, Dispatch the exchange to them, Products what they compute, Combine the exchange back.
	Gate, Dispatch, Products, Combine float64
}

// Total is the sum of the stages.
func (t LayerTime) Total() float64 { return t.Gate + t.Dispatch + t.Products + t.Combine }

// Time is that of the layer on machines, for what it does: a pure function, which steps of the simulation are made of. With one rank nothing is exchanged.
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
	// What was sent comes back: the busiest sender is now the busiest receiver.
	us.Combine = summed/speed + t.Exchange(messages, float64(l.Hidden)*bf16)
	if l.Kernels.Sums {
		us.Combine += 2 * p.Dense.Start
	}
	return us
}

// gate is the time of the scores of a rank's tokens, and of choosing by them.
func (l *Layer) gate(p *hardware.Profile, tokens int) float64 {
	us := p.Dense.Microseconds(float64(l.Hidden*l.Experts), float64(tokens))
	if l.Kernels.Choose.PerMicrosecond > 0 {
		us += l.Kernels.Choose.Microseconds(float64(tokens * l.Experts))
	}
	return us
}

// moved are the bytes that the busiest rank reads and writes before it sends rows, and to sum results: of rows into messages where the experts are,
// and of messages, those to itself among them, into tokens at home.
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

// products are the times of a rank's experts: gate and up projections in one grouped kernel, the down projections in another, and the kernels
// between. Only experts with rows are read, and a tile that is not full takes as long as one that is.
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
