// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// Method is a way to place experts and to dispatch requests or tokens.
type Method struct {
	// Name is the display name.
	Name string
	// Placement assigns experts to ranks.
	Placement *placement.Placement
	// Policy assigns requests to ranks (attention DP), based on the scores of Requests if the policy uses scores.
	// Scores depend on the prompt only.
	Policy   dispatch.Policy
	Requests cost.PartialForecast
	// Tokens scores the tokens of a batch, which is divided into equal shards by the scores (attention TP); nil assigns
	// tokens round-robin.
	Tokens cost.TokenForecast
}
