// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// constraintFlags are the flags of semmoe solve that constrain the placement.
type constraintFlags struct {
	// given reports whether a flag is set on the command line.
	given          func(name string) bool
	moveBudget     int
	migrationCost  float64
	pins           []string
	rankCapacity   []float64
	expert, tokens float64
}

func (f *constraintFlags) add(cmd *cobra.Command) {
	to := cmd.Flags()
	f.given = to.Changed
	to.IntVar(&f.moveBudget, "move-budget", 0, "maximum number of experts per layer that may move relative to --current (default: unlimited)")
	to.Float64Var(&f.migrationCost, "migration-cost", 0, "minimum gain of a moved expert over the profile, in local activations, or in messages with the other objectives\n(requires --current)")
	to.StringArrayVar(&f.pins, "pin", nil, "expert pinned to a rank, as `layer:expert:rank`; the layer index includes dense layers (repeatable)")
	cli.NumbersVar(to, &f.rankCapacity, "rank-capacity", nil, "relative token `shares`, one number per rank, such as 1,1,0.5,0.5; the number of slots stays equal (default: equal shares)")
	to.Float64Var(&f.expert, "expert-load-limit", 0, "maximum activation load of a rank's experts per layer on the profile, in percent of the mean (default: unlimited)")
	to.Float64Var(&f.tokens, "token-load-limit", 0, "maximum token load of a rank, in percent of its share, on the profile and as cap of dispatch in the evaluation\n(default: 102 and 115)")
}

func (f *constraintFlags) constraints() (placement.Constraints, error) {
	c := placement.Constraints{
		MigrationCost: f.migrationCost, RankCapacity: f.rankCapacity, ExpertLoadLimit: f.expert, TokenLoadLimit: f.tokens,
	}
	if f.given("move-budget") {
		c.MoveBudget = &f.moveBudget
	}
	for _, text := range f.pins {
		pin, ok := parsePin(text)
		if !ok {
			return c, cli.UsageErrorf("--pin is %q; it must be layer:expert:rank, three numbers", text)
		}
		c.Pins = append(c.Pins, pin)
	}
	return c, nil
}

func parsePin(text string) (placement.Pin, bool) {
	var numbers [3]int
	parts := strings.Split(text, ":")
	if len(parts) != len(numbers) {
		return placement.Pin{}, false
	}
	for i, part := range parts {
		var err error
		if numbers[i], err = strconv.Atoi(part); err != nil {
			return placement.Pin{}, false
		}
	}
	return placement.Pin{Layer: numbers[0], Expert: numbers[1], Rank: numbers[2]}, true
}

// moves returns the number of experts on ranks that do not hold them in the current placement, or nil without a current
// placement.
func moves(o *solver.Options, s *solver.Solution) *int {
	if o.Current == nil {
		return nil
	}
	n := placement.Moves(o.Current, s.Plan.Placement)
	return &n
}
