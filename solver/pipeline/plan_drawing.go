// SPDX-License-Identifier: Apache-2.0

package pipeline

import "fmt"

// Draw returns an SVG drawing of the first layers of a plan for samples of the given length. It simulates one more
// layer than it draws: later layers do not change the first ones.
func (p *Plan) Draw(sequence, layers int) ([]byte, error) {
	sizes := p.Sizes
	sizes.Layers = min(sizes.Layers, layers+1)
	schedule, err := simulate(p.Durations, sizes, p.Order)
	if err != nil {
		return nil, err
	}
	title := fmt.Sprintf("%d attention and %d expert ranks, %d tokens: micro-batches %d × samples %d, chunks %d, %s", p.AttentionRanks, p.ExpertRanks, sequence,
		p.Sizes.MicroBatches, p.Samples, p.Sizes.Chunks, p.OrderName)
	return gantt(schedule, title, layers, p.Sizes.Layers), nil
}
