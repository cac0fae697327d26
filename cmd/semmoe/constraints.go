package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// constraintFlags are the flags of semmoe solve that narrow the choice of the placement.
type constraintFlags struct {
	// given tells whether a flag stands on the command line.
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
	to.IntVar(&f.moveBudget, "move-budget", 0, "most experts of a layer that change their rank against --current (default: any number)")
	to.Float64Var(&f.migrationCost, "migration-cost", 0, "what an expert that changes its rank must gain over the profile: local activations, or with the other objectives\nmessages (needs --current)")
	to.StringArrayVar(&f.pins, "pin", nil, "expert that stays on a rank, as `layer:expert:rank`; the layer is the model's, dense layers counted (repeatable)")
	numbersVar(to, &f.rankCapacity, "rank-capacity", nil, "relative `shares` of the tokens, one number per rank, such as 1,1,0.5,0.5; slots stay equal (default: equal shares)")
	to.Float64Var(&f.expert, "expert-load-limit", 0, "largest activation load of a rank's experts in a layer on the profile, in percent of the mean (default: any)")
	to.Float64Var(&f.tokens, "token-load-limit", 0, "largest token load of a rank, in percent of its share, on the profile and as cap of the evaluation's dispatch\n(default: 102 and 115)")
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
			return c, usageErrorf("--pin is %q; it must be layer:expert:rank, three numbers", text)
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

// moves is the number of experts that ranks do not hold in the current placement; nil where there is none.
func moves(o *solver.Options, s *solver.Solution) *int {
	if o.Current == nil {
		return nil
	}
	n := placement.Moves(o.Current, s.Plan.Placement)
	return &n
}
