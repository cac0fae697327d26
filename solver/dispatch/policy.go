package dispatch

import (
	"fmt"
	"strings"
)

// Policy names a way to choose ranks for requests.
type Policy string

// The policies.
const (
	// Price takes the place of the highest value: affinity and reused prefix less price and load (see Decision), among ranks
	// below the cap; prices rise with load.
	Price Policy = "price"
	// Masked takes the best score among ranks that have not yet had a request in the present round.
	Masked Policy = "masked"
	// Window assigns a queue of requests exactly, the same number to each rank.
	Window Policy = "window"
	// Late is Price for requests that may wait a little until they give nothing up by going (see Line).
	Late Policy = "late"
	// RoundRobin takes one rank after the other.
	RoundRobin Policy = "round-robin"
	// LeastLoaded takes the place with the fewest outstanding tokens.
	LeastLoaded Policy = "least-loaded"
	// Prefix takes the place that holds most of the request's beginning, among ranks below the cap.
	Prefix Policy = "prefix"
)

// Policies lists all policies.
var Policies = []Policy{Price, Masked, Window, Late, RoundRobin, LeastLoaded, Prefix}

// ParsePolicy returns the policy of that name.
func ParsePolicy(name string) (Policy, error) {
	for _, p := range Policies {
		if string(p) == name {
			return p, nil
		}
	}
	return "", fmt.Errorf("policy %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Policies), "[]"))
}

// Weighs reports whether the policy can give ranks unequal shares of the load.
func (p Policy) Weighs() bool { return p == Price || p == Late || p == LeastLoaded || p == Prefix }

// AtOnce reports whether the policy decides on a request when it arrives, as a Scheduler does.
func (p Policy) AtOnce() bool { return p != Window && p != Late }
