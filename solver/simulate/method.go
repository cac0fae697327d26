package simulate

import (
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// Method is a way to place experts and to dispatch requests or tokens.
type Method struct {
	// Name is for people.
	Name string
	// Placement says where experts are.
	Placement *placement.Placement
	// Policy sends requests to ranks (attention DP), by the scores of Requests where it looks at scores; they see the prompt alone.
	Policy   dispatch.Policy
	Requests cost.PartialForecast
	// Tokens scores the tokens of a batch, which is cut into equal shards by the scores (attention TP); nil deals them out in turn.
	Tokens cost.TokenForecast
}
