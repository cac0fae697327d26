// SPDX-License-Identifier: Apache-2.0

package pipeline

import "fmt"

// Check returns an error for a plan that cannot be executed. Plans of Search always pass.
func (p *Plan) Check() error {
	if p.AttentionRanks < 1 || p.ExpertRanks < 1 || p.Samples < 1 {
		return fmt.Errorf("there are %d attention ranks, %d expert ranks and %d samples of a micro-batch; all must be at least 1", p.AttentionRanks, p.ExpertRanks, p.Samples)
	}
	if err := p.Sizes.Check(); err != nil {
		return err
	}
	if err := p.Order.Check(p.Sizes.MicroBatches); err != nil {
		return err
	}
	if !p.Durations.possible() {
		return fmt.Errorf("durations are %+v; attention and a stage of the chunks must be above 0, none below", p.Durations)
	}
	if !(p.Makespan > 0) || !(p.TokensPerSecond > 0) || !(p.TokensPerExpert > 0) {
		return fmt.Errorf("makespan_us is %v, tokens_per_second %v, tokens_per_expert %v; all must be above 0", p.Makespan, p.TokensPerSecond, p.TokensPerExpert)
	}
	return nil
}
