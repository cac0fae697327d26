package cost

// Link models an all-to-all: a start-up time and a bandwidth, both per rank.
type Link struct {
	// StartMicroseconds is the time of an exchange without data.
	StartMicroseconds float64
	// BytesPerMicrosecond is what a rank sends, or receives, in a microsecond.
	BytesPerMicrosecond float64
}

// NVLinkH200 is the least-squares fit (R² 0.996) over 56 measured all-to-alls between 4 H200 over NVLink with NCCL 2.28:
// 64 to 8,192 tokens per rank, top-8, hidden size 2,048 and 7,168, bf16, local activation rates .25 to .9.
var NVLinkH200 = Link{StartMicroseconds: 86, BytesPerMicrosecond: 283e3}

// RDMA400 is one 400 Gb/s adapter for each rank, at its nominal rate; dispatch kernels have been measured at 43 to 58 GB/s
// over such. The time without data has not been measured: it is that of NVLink.
var RDMA400 = Link{StartMicroseconds: 86, BytesPerMicrosecond: 50e3}

// NodeMessage is what a message to another node costs in messages to another rank: the rates' ratio, as both carry the same
// token.
func NodeMessage(ranks, nodes Link) float64 {
	return ranks.BytesPerMicrosecond / nodes.BytesPerMicrosecond
}

// Microseconds is the time in which a rank exchanges that many bytes.
func (l Link) Microseconds(bytes float64) float64 {
	return l.StartMicroseconds + bytes/l.BytesPerMicrosecond
}

// layerMicroseconds is the time of a MoE layer's dispatch and combine, bf16 each way, when a rank holds that many tokens
// and the busiest rank exchanges the given multiple of a rank's activations.
func layerMicroseconds(link Link, tokensPerRank, exchange float64, topK, hiddenSize int) float64 {
	const bf16 = 2
	bytes := tokensPerRank * exchange * float64(topK) * float64(hiddenSize) * bf16
	return 2 * link.Microseconds(bytes)
}
